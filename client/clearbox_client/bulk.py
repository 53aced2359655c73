# SPDX-License-Identifier: Apache-2.0
"""Responses with rows in binary form: safetensors, with the JSON in their metadata."""

import json
from collections.abc import Mapping
from typing import Any

import httpx

SAFETENSORS = "application/safetensors"


def accept_of(body: Mapping[str, Any]) -> dict[str, str]:
    """The `Accept` header of a request: binary if it captures.

    Compressed rows exist only in JSON.
    """
    capture = body.get("capture")
    if not isinstance(capture, Mapping) or body.get("stream"):
        return {}
    specs = [spec for spec in capture.values() if isinstance(spec, Mapping)]
    if any(spec.get("encoding") == "zstd" for spec in specs):
        return {}
    return {"Accept": f"{SAFETENSORS}, application/json"}


def document_in(response: httpx.Response) -> Any:
    """The JSON of a response; rows in binary form become its `data`, as bytes."""
    if not response.content:
        return {}
    kind = response.headers.get("content-type", "").partition(";")[0]
    if kind != SAFETENSORS:
        return response.json()
    # Layout: https://github.com/huggingface/safetensors
    content = memoryview(response.content)
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(bytes(content[8:start]))
    document = json.loads(header.pop("__metadata__")["response"])
    parts = {
        name: content[
            start + entry["data_offsets"][0] : start + entry["data_offsets"][1]
        ]
        for name, entry in header.items()
    }
    _fill(document.get("capture_results"), parts)
    return document


def _fill(here: Any, parts: Mapping[str, memoryview]) -> None:
    """Put the bytes of parts in the place of their names."""
    if isinstance(here, list):
        for one in here:
            _fill(one, parts)
    elif isinstance(here, dict):
        name = here.get("part")
        if isinstance(name, str) and name in parts:
            here["data"] = parts[here.pop("part")]
            return
        for one in here.values():
            _fill(one, parts)
