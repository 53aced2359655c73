# SPDX-License-Identifier: Apache-2.0
"""OpenAPI schemas of the request bodies of `/v1/steering`.

For clients and fuzzing only: the routes read their bodies themselves, after checking
the key, and validate them in full at admission.
"""

from typing import Any

from vllm.v1.residual.addresses import ALIASES
from vllm.v1.residual.spans import NAMED
from vllm.v1.steering.features import MODES
from vllm.v1.steering.operations import OP_NAMES
from vllm.v1.steering.spec.entry import ACTIVATIONS, KEYS
from vllm.v1.steering.spec.matrix import ALL_GENERATED
from vllm.v1.steering.spec.packing import NAMES
from vllm.v1.steering.spec.parse import HOOKS, PACKED_KEYS, SHARED_KEYS
from vllm.v1.steering.spec.provenance import COUNTS, LAYER_CONVENTION, TEXTS
from vllm.v1.steering.spec.when import KEYS as WHEN_KEYS

Schema = dict[str, Any]


def _shape(fewest: int, most: int) -> Schema:
    size = {"type": "integer", "minimum": 1}
    return {"type": "array", "items": size, "minItems": fewest, "maxItems": most}


def _array(of: Schema) -> Schema:
    """Numbers as a list, or packed."""
    packed = {
        "type": "object",
        "properties": {
            "dtype": {"enum": list(NAMES)},
            "shape": _shape(1, 2),
            "data": {"type": "string", "contentEncoding": "base64"},
        },
        "required": ["dtype", "shape", "data"],
        "additionalProperties": False,
    }
    return {"anyOf": [{"type": "array", "items": of, "minItems": 1}, packed]}


NUMBERS: Schema = {"type": "array", "items": {"type": "number"}, "minItems": 1}
ARRAY: Schema = _array({"type": "number"})
MATRIX: Schema = _array(NUMBERS)
NUMBER: Schema = {"type": "number"}


def _only(**properties: Schema) -> Schema:
    """An object with exactly these keys."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


RANGE: Schema = {
    "type": "array",
    "items": {"type": "integer"},
    "minItems": 2,
    "maxItems": 2,
}
POSITIONS: Schema = {
    "anyOf": [
        {"type": "array", "items": {"type": "integer"}, "minItems": 1},
        {"enum": [*NAMED, ALL_GENERATED]},
        _only(last={"type": "integer", "minimum": 1}),
        _only(ranges={"type": "array", "items": RANGE, "minItems": 1}),
    ]
}
WHEN: Schema = {
    "type": "object",
    "properties": {key: {} for key in WHEN_KEYS},
    "additionalProperties": False,
}
SOURCE: Schema = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {
            "type": "object",
            "properties": {"run": {"type": "string"}, "positions": POSITIONS},
            "required": ["run"],
            "additionalProperties": False,
        },
    ]
}
INDICES: Schema = _only(indices={"type": "array", "items": {"type": "integer"}})
ENTRY: Schema = {
    "type": "object",
    "properties": {
        "op": {"enum": list(OP_NAMES)},
        "from": SOURCE,
        "mask": {"anyOf": [ARRAY, INDICES]},
        "positions": POSITIONS,
        **dict.fromkeys(("vector", "target", "bias", "threshold"), ARRAY),
        **dict.fromkeys(("vectors", "plane", "read", "write"), MATRIX),
        **dict.fromkeys(("scale", "min", "max", "value", "strength"), NUMBER),
        "alpha": NUMBER,
        "degrees": NUMBER,
        "activation": {"enum": list(ACTIVATIONS)},
        "norm_match": {"type": "boolean"},
        "sae": {"type": "string", "minLength": 1},
        "feature": {"type": "integer", "minimum": 0},
        "mode": {"enum": list(MODES)},
        "only_if_active": {"type": "boolean"},
        "when": WHEN,
    },
    "additionalProperties": False,
}
AT_LAYER: Schema = {
    "anyOf": [NUMBERS, ENTRY, {"type": "array", "items": ENTRY, "minItems": 1}]
}
BY_LAYER: Schema = {
    "type": "object",
    "patternProperties": {
        "^(all|[0-9]{1,9}(-[0-9]{1,9})?(,[0-9]{1,9}(-[0-9]{1,9})?)*)$": AT_LAYER
    },
    "additionalProperties": False,
    "minProperties": 1,
}
PACKED: Schema = {
    "type": "object",
    "properties": {
        "dtype": {"enum": list(NAMES)},
        "shape": _shape(2, 3),
        "layer_indices": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0},
            "minItems": 1,
        },
        "data": {"type": "string", "contentEncoding": "base64"},
        "scales": NUMBERS,
        **{key: ENTRY["properties"][key] for key in SHARED_KEYS},
    },
    "required": sorted(PACKED_KEYS - {"scales"}),
    "additionalProperties": False,
}
VECTORS: Schema = {
    "type": "object",
    "properties": {hook: {"anyOf": [BY_LAYER, PACKED]} for hook in (*HOOKS, *ALIASES)},
    # Addresses, which name a layer, too.
    "patternProperties": {r"^[a-z_]+\.[a-z0-9_.]+$": AT_LAYER},
    "additionalProperties": False,
    "minProperties": 1,
}
NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 128}
TIERS: dict[str, Schema] = dict.fromkeys(
    ("vectors", "prefill_vectors", "decode_vectors"), VECTORS
)
CLAMP: Schema = {
    "type": "object",
    "properties": {
        "vector": ARRAY,
        **dict.fromkeys(("min", "max", "value", "strength"), NUMBER),
        "positions": POSITIONS,
    },
    "required": ["vector"],
}
CLAMPS: Schema = {
    "type": "object",
    "properties": {
        hook: {
            "type": "object",
            "patternProperties": {
                "^[0-9]{1,9}$": {"type": "array", "items": CLAMP, "minItems": 1}
            },
        }
        for hook in HOOKS
    },
    "minProperties": 1,
}
TIERS |= dict.fromkeys(("clamps", "prefill_clamps", "decode_clamps"), CLAMPS)
METADATA: Schema = {
    "type": "object",
    "properties": {
        "layer_convention": {"const": LAYER_CONVENTION},
        **{name: {"type": "string"} for name in TEXTS},
        **{name: {"type": "integer", "minimum": 1} for name in COUNTS},
        "norms": {"type": "object", "additionalProperties": {"type": "number"}},
    },
    "additionalProperties": False,
}
FLAG: Schema = {"type": "boolean", "default": False}

assert set(ENTRY["properties"]) == set(KEYS), "the schema knows other keys"


def body(*required: str, **properties: Schema) -> Schema:
    """The `openapi_extra` of a route: its JSON body and its error responses."""
    content = {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }
    refusals = {
        "400": "The body is invalid; the message names parameter, value and remedy.",
        "401": "The steering key is missing or wrong.",
        "413": "The body is too large.",
    }
    return {
        "requestBody": {
            "required": bool(required),
            "content": {"application/json": {"schema": content}},
        },
        "responses": {code: {"description": text} for code, text in refusals.items()},
    }


SET = body(**TIERS, replace=FLAG)
CLEAR = body()
REGISTER = body("name", name=NAME, **TIERS, metadata=METADATA, replace=FLAG)
UNREGISTER = body("name", name=NAME)
KIND: Schema = {"enum": ["probe", "steer"]}
BY_HOOK: Schema = {
    "type": "object",
    "properties": {hook: PACKED for hook in HOOKS},
    "additionalProperties": False,
    "minProperties": 1,
}
REGISTER_VECTOR = body("name", "kind", "packed", name=NAME, kind=KIND, packed=BY_HOOK)
UNREGISTER_VECTOR = body("name", "kind", name=NAME, kind=KIND)
