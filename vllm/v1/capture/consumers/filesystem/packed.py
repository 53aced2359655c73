# SPDX-License-Identifier: Apache-2.0
"""Layout `packed`: all keys of a request in one file, with an index beside it."""

import json
from collections.abc import Iterator
from typing import Any

from vllm.v1.capture.consumers.filesystem.layouts import Writing, stage_suffix
from vllm.v1.capture.consumers.filesystem.per_file import publication, said
from vllm.v1.capture.consumers.filesystem.sidecar import entry, request_facts
from vllm.v1.capture.consumers.storage.files import Bytes
from vllm.v1.capture.consumers.storage.request import StoredRequest
from vllm.v1.capture.types import CaptureFinalize, CaptureResult


def write_packed(
    request: StoredRequest, finalizes: list[CaptureFinalize], writing: Writing
) -> None:
    """Have the request's keys written one after the other.

    Raises:
        OSError: nothing was written.

    """
    if not finalizes:
        request.settle(())
        return
    folder = writing.workspace.folder(writing.tag, writing.name)
    base = f"{folder}/packed{stage_suffix(finalizes[0].sidecar)}"
    shared = request_facts([finalize.sidecar for finalize in finalizes])
    entries: list[dict[str, Any]] = []
    aside, rows = writing.placed(
        request, keys_in_turn(request, finalizes, writing, shared, entries, 0)
    )
    index = {"layout": "packed", "request_id": writing.name, **shared}
    text = json.dumps({**index, "entries": entries}).encode()

    def answer(error: OSError | None) -> None:
        if error is not None:
            request.settle_error(said(error, f"{base}.bin"))
            return
        first, *others = (finalize.key for finalize in finalizes)
        # The file is named once: the request's payload is the list of its files.
        named = CaptureResult(first, "ok", payload=[f"{base}.bin"])
        request.settle([named, *(CaptureResult(key, "ok") for key in others)])

    writing.submission.submit(publication(writing, aside, rows, base, text), answer)


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
        entries.append(entry(finalize.sidecar, shared, offset, encoder))
        offset += encoder.num_bytes
