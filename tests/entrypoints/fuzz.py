# SPDX-License-Identifier: Apache-2.0
"""Random requests from a server's OpenAPI description, valid and invalid."""

from collections.abc import Mapping, Sequence
from typing import Any

import schemathesis
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode

SECONDS = 60.0


def body_of(document: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The schema of the JSON body of `POST path` in a server's description."""
    content = document["paths"][path]["post"]["requestBody"]["content"]
    schema = content["application/json"]["schema"]
    name = schema["$ref"].rsplit("/", 1)[1]
    found: dict[str, Any] = document["components"]["schemas"][name]
    return found


def only(schema: Mapping[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """`schema` restricted to these fields."""
    missing = set(fields) - schema["properties"].keys()
    assert not missing, f"the served description has no {sorted(missing)}"
    return {
        "type": "object",
        "properties": {name: schema["properties"][name] for name in fields},
        "additionalProperties": False,
    }


def drawn(
    path: str,
    schema: Mapping[str, Any],
    fixed: Mapping[str, Any],
    components: Mapping[str, Any] | None = None,
) -> st.SearchStrategy[Case]:
    """Random requests of `POST path` whose body follows or violates `schema`.

    Args:
        path: the route.
        schema: the schema of the body.
        fixed: fields that override those of each drawn object, to keep requests small.
        components: the definitions to which `schema` refers.

    """
    document = {
        "openapi": "3.1.0",
        "info": {"title": "fuzz", "version": "1"},
        "paths": {
            path: {
                "post": {
                    "requestBody": {
                        "required": True,
                        "content": {"application/json": {"schema": dict(schema)}},
                    },
                    "responses": {"200": {"description": "served"}},
                }
            }
        },
        "components": dict(components or {}),
    }
    operation = schemathesis.openapi.from_dict(document)[path]["POST"]

    def with_fixed(case: Case) -> Case:
        if isinstance(case.body, dict):
            case.body = {**case.body, **fixed}
        return case

    modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    either = [operation.as_strategy(generation_mode=mode) for mode in modes]
    return st.one_of(either).map(with_fixed)


def status_of(case: Case, url: str) -> tuple[int, str]:
    """Send a request; returns the status and the body of the reply."""
    reply = case.call(base_url=url, timeout=SECONDS)
    return reply.status_code, reply.text
