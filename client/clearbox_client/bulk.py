# SPDX-License-Identifier: Apache-2.0
"""Responses with rows in binary form: safetensors, with the JSON in their metadata."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

SAFETENSORS = "application/safetensors"

Content = bytes | memoryview


def accept_of(body: Mapping[str, Any]) -> dict[str, str]:
    """The `Accept` header of a request: binary if it captures."""
    capture = body.get("capture")
    if not isinstance(capture, Mapping) or body.get("stream"):
        return {}
    return {"Accept": f"{SAFETENSORS}, application/json"}


def document_in(content: Content, kind: str) -> Any:
    """The JSON of a response; rows in binary form become its `data`, as bytes.

    Args:
        content: the response's body.
        kind: its media type.

    """
    if not content:
        return {}
    if kind != SAFETENSORS:
        return json.loads(bytes(content))
    # Layout: https://github.com/huggingface/safetensors
    content = memoryview(content)
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(bytes(content[8:start]))
    document = json.loads(header.pop("__metadata__")["response"])
    for entry in entries_in(document.get("capture_results")):
        if (name := entry.get("part")) in header:
            begin, end = header[name]["data_offsets"]
            entry["data"] = content[start + begin : start + end]
            del entry["part"]
    return document


def entries_in(here: Any) -> Iterator[dict[str, Any]]:
    """The objects in capture results that describe rows."""
    if isinstance(here, dict):
        if "dtype" in here and "shape" in here:
            yield here
            return
        here = here.values()
    elif not isinstance(here, list):
        return
    for one in here:
        if isinstance(one, (dict, list)):
            yield from entries_in(one)
