# SPDX-License-Identifier: Apache-2.0
"""The fields of the request bodies of `/v1/steering`, for the OpenAPI document.

The routes read their bodies themselves, after checking the key. What a vector may be is
checked at admission, and described in `docs/steering/`.
"""

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "minLength": 1}
FLAG: Schema = {"type": "boolean", "default": False}
OBJECT: Schema = {"type": "object"}
BY_HOOK: Schema = {
    "type": "object",
    "description": "By hook point: vectors, numbers or entries by layer, or packed.",
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
