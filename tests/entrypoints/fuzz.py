# SPDX-License-Identifier: Apache-2.0
"""Requests drawn from a server's OpenAPI description, good ones and bad ones."""

from collections.abc import Mapping, Sequence
from typing import Any

import schemathesis
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode

SECONDS = 60.0


def body_of(document: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The schema of the JSON body that `POST path` takes, by a served description."""
    content = document["paths"][path]["post"]["requestBody"]["content"]
    schema = content["application/json"]["schema"]
    name = schema["$ref"].rsplit("/", 1)[1]
    found: dict[str, Any] = document["components"]["schemas"][name]
    return found


def only(schema: Mapping[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """`schema` with these of its fields and no others."""
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
    """Requests of `POST path` whose body follows `schema`, or breaks it.

    Args:
        path: the route.
        schema: what is drawn of the body.
        fixed: put over each drawn body that is an object, so that fields which are
            not looked at keep the request small.
        components: what `schema` refers to.

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
    """Send a drawn request; the status and the body of the reply."""
    reply = case.call(base_url=url, timeout=SECONDS)
    return reply.status_code, reply.text
