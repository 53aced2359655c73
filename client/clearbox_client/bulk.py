# SPDX-License-Identifier: Apache-2.0
"""Responses with rows in binary form: safetensors, with the JSON in their metadata.

A body whose length is known is read into an array, of which the rows are views.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
from clearbox_client.direct import WHOLE
from clearbox_client.memory import MEMORY

SAFETENSORS = "application/safetensors"

Content = bytes | memoryview


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


def kind_of(response: httpx.Response) -> str:
    """The media type of a response."""
    kind: str = response.headers.get("content-type", "").partition(";")[0]
    return kind


def read(response: httpx.Response) -> Content:
    """Read the body of an open response; writable if it is binary."""
    array = _array_for(response)
    if array is None:
        return response.read()
    if (whole := response.extensions.get(WHOLE)) is not None:
        found: Content = whole(array)
        return found
    start = 0
    for piece in response.iter_raw():
        array[start : start + len(piece)] = piece
        start += len(piece)
    return array


async def read_async(response: httpx.Response) -> Content:
    """`read` for the response of an asynchronous client."""
    array = _array_for(response)
    if array is None:
        return await response.aread()
    if (whole := response.extensions.get(WHOLE)) is not None:
        found: Content = await whole(array)
        return found
    start = 0
    async for piece in response.aiter_raw():
        array[start : start + len(piece)] = piece
        start += len(piece)
    return array


def _array_for(response: httpx.Response) -> memoryview | None:
    """Memory for a binary body; None if its size is unknown, or it is read already."""
    headers = response.headers
    size = headers.get("content-length")
    if size is None or "content-encoding" in headers or response.is_stream_consumed:
        return None
    if kind_of(response) != SAFETENSORS:
        return None
    return MEMORY.take(int(size))


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
