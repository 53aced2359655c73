# SPDX-License-Identifier: Apache-2.0
"""Responses with rows in binary form: safetensors, with the JSON in their metadata."""

import json
from collections.abc import Mapping
from typing import Any

import httpx2

SAFETENSORS = "application/safetensors"


def accept_of(body: Mapping[str, Any]) -> dict[str, str]:
    """The `Accept` header of a request: binary if it asks for rows.

    Compressed rows exist only in JSON.
    """
    capture = body.get("capture")
    if not isinstance(capture, Mapping):
        return {}
    specs = [spec for spec in capture.values() if isinstance(spec, Mapping)]
    if any(spec.get("encoding") == "zstd" for spec in specs):
        return {}
    return {"Accept": f"{SAFETENSORS}, application/json"}


def document_in(response: httpx2.Response) -> Any:
    """The JSON of a response; rows in binary form become its `data`, as bytes.

    Text that is not JSON is returned as it is, unless it is declared as JSON.

    Raises:
        ValueError: the server sent something else than it says.

    """
    kind = response.headers.get("content-type", "").partition(";")[0]
    if kind != SAFETENSORS:
        try:
            return json.loads(response.content)
        except ValueError:
            if kind.endswith("json"):
                raise
            return response.text
    # Layout: https://github.com/huggingface/safetensors
    content = memoryview(bytearray(response.content))  # tensors must be writable
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(bytes(content[8:start]))
    document = json.loads(header.pop("__metadata__")["response"])
    parts = {
        name: content[slice(*(start + offset for offset in entry["data_offsets"]))]
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
