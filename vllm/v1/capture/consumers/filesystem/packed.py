# SPDX-License-Identifier: Apache-2.0
"""Layout `packed`: all keys of a request in one file, with an index beside it."""

import json
from collections.abc import Iterator
from typing import Any

from vllm.v1.capture.consumers.filesystem.layout import Writing, stage_suffix
from vllm.v1.capture.consumers.filesystem.per_file import publish_pair
from vllm.v1.capture.consumers.filesystem.sidecar import entry, request_facts
from vllm.v1.capture.consumers.storage.files import Bytes
from vllm.v1.capture.consumers.storage.request import StoredRequest
from vllm.v1.capture.types import CaptureFinalize, CaptureResult


def write_packed(
    request: StoredRequest, finalizes: list[CaptureFinalize], writing: Writing
) -> list[CaptureResult]:
    """Write the request's keys one after the other.

    Raises:
        OSError: nothing was written.

    """
    if not finalizes:
        return []
    params, workspace = writing.params, writing.workspace
    folder = workspace.folder(writing.tag, writing.name)
    base = f"{folder}/packed{stage_suffix(finalizes[0].sidecar)}"
    shared = request_facts([finalize.sidecar for finalize in finalizes])
    entries: list[dict[str, Any]] = []
    rows = workspace.write(
        keys_in_turn(request, finalizes, writing, shared, entries, 0),
        params.coalesce_max_bytes,
        params.fsync,
    )
    index = {"layout": "packed", "request_id": writing.name, **shared}
    text = json.dumps({**index, "entries": entries}).encode()
    replace = params.on_collision == "overwrite"
    publish_pair(writing, rows, f"{base}.bin", text, f"{base}.json", replace)
    first, *others = (finalize.key for finalize in finalizes)
    # The file is named once: the request's payload is the list of its files.
    return [
        CaptureResult(first, "ok", payload=[f"{base}.bin"]),
        *(CaptureResult(key, "ok") for key in others),
    ]


def keys_in_turn(
    request: StoredRequest,
    finalizes: list[CaptureFinalize],
    writing: Writing,
    shared: dict[str, Any],
    entries: list[dict[str, Any]],
    offset: int,
) -> Iterator[Bytes]:
    """The bytes of all keys; adds each key's entry once its bytes are through."""
    for finalize in finalizes:
        encoder = writing.encoder(finalize)
        yield from writing.encoded(request, finalize, encoder)
        description = encoder.describe()
        entries.append(
            entry(finalize.sidecar, shared, offset, encoder.num_bytes, description)
        )
        offset += encoder.num_bytes
