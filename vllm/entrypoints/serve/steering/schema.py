# SPDX-License-Identifier: Apache-2.0
"""The fields of the request bodies of `/v1/steering`, for the OpenAPI document.

The routes read their bodies themselves, after checking the key. The forms of a vector
are named; the keys of an entry are checked at admission, and described in
`docs/steering/`.
"""

from typing import Any

from vllm.v1.steering.spec.entry import OPS
from vllm.v1.steering.spec.parse import PACKED_KEYS

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "minLength": 1}
FLAG: Schema = {"type": "boolean", "default": False}
OBJECT: Schema = {"type": "object"}
NUMBERS: Schema = {"type": "array", "items": {"type": "number"}}
ENTRY: Schema = {
    "type": "object",
    "properties": {"op": {"enum": list(OPS)}},
    "anyOf": [{"required": [key]} for key in ("op", "vector", "vectors")],
}
AT_A_PLACE: list[Schema] = [NUMBERS, ENTRY, {"type": "array", "items": ENTRY}]
PACKED: Schema = {"type": "object", "required": sorted(PACKED_KEYS - {"scales"})}
BY_LAYER: Schema = {"type": "object", "additionalProperties": {"anyOf": AT_A_PLACE}}
BY_HOOK: Schema = {
    "type": "object",
    "description": "By hook point: numbers, an entry or several by layer, or packed; "
    "by the address of a place: numbers, an entry or several.",
    "additionalProperties": {"anyOf": [PACKED, BY_LAYER, *AT_A_PLACE]},
}
TIERS: dict[str, Schema] = dict.fromkeys(
    (
        *("vectors", "prefill_vectors", "decode_vectors"),
        *("clamps", "prefill_clamps", "decode_clamps"),
    ),
    BY_HOOK,
)


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
REGISTER = body("name", name=TEXT, **TIERS, metadata=OBJECT, replace=FLAG)
UNREGISTER = body("name", name=TEXT)
KIND: Schema = {"enum": ["probe", "steer"]}
REGISTER_VECTOR = body("name", "kind", "packed", name=TEXT, kind=KIND, packed=BY_HOOK)
UNREGISTER_VECTOR = body("name", "kind", name=TEXT, kind=KIND)
