# SPDX-License-Identifier: Apache-2.0
"""The layouts, and the choice of one for each request.

`per_file` writes one file of rows and one JSON file per key, `packed` one file with all
keys of a request and one JSON index. `sharded` has a module of its own.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm.v1.capture.consumers.filesystem.file_pair import (
    Writing,
    key_json,
    keys_in_turn,
    message_of,
    request_facts,
    stage_suffix,
)
from vllm.v1.capture.consumers.filesystem.params import FilesystemParams
from vllm.v1.capture.consumers.filesystem.sharded import ShardedLayout
from vllm.v1.capture.consumers.storage.codecs import parse_codec
from vllm.v1.capture.consumers.storage.files import Workspace, sole_writer
from vllm.v1.capture.consumers.storage.names import place_of
from vllm.v1.capture.consumers.storage.stored_request import StoredRequest
from vllm.v1.capture.consumers.storage.threads import Task
from vllm.v1.capture.types import CaptureFinalize, CaptureResult


class Layouts:
    """Writes each request in its own layout, or the consumer's; a `Publisher`."""

    def __init__(self, params: FilesystemParams) -> None:
        self._params = params
        self._sharded = ShardedLayout(params)

    def publish(self, request: StoredRequest, workspace: Workspace) -> None:
        """Write the rows of a request."""
        finalizes = request.writable()
        sidecars = [finalize.sidecar for finalize in request.finalizes.values()]
        if not sidecars:
            request.settle(())
            return
        client = sidecars[0].get("client_spec") or {}
        layout = client.get("layout") or self._params.default_layout
        tag, name = place_of(sidecars[0], self._params.default_tag)
        codec = parse_codec(
            client.get("codec") or self._params.codec, "capture.filesystem.codec"
        )
        writing = Writing(self._params, workspace, tag, name, codec)
        if layout == "sharded":
            self._sharded.write(request, finalizes, writing)
            return
        if not finalizes:
            request.settle(())
            return
        folder = workspace.folder(tag, name)
        write = write_packed if layout == "packed" else write_per_file
        with sole_writer(folder):
            write(request, finalizes, writing, folder)

    def due(self, now: float, closing: bool, running: bool) -> Sequence[Task]:
        """Tasks that seal the shards that are due."""
        return self._sharded.shards.due(now, closing, running)


def write_per_file(
    request: StoredRequest,
    finalizes: list[CaptureFinalize],
    writing: Writing,
    folder: Path,
) -> None:
    """Write each key to files of its own; keys fail independently."""
    results = []
    for finalize in finalizes:
        _, layer, hook = finalize.key
        base = f"{folder}/{layer}_{hook}"
        try:
            _write_key(request, finalize, writing, base)
        except OSError as error:
            failure = message_of(error, f"{base}.bin")
            results.append(CaptureResult(finalize.key, "error", failure))
        else:
            payload = [f"{base}.bin"]
            results.append(CaptureResult(finalize.key, "ok", payload=payload))
        if request.settled.is_set():  # It took too long.
            return
    request.settle(results)


def _write_key(
    request: StoredRequest, finalize: CaptureFinalize, writing: Writing, base: str
) -> None:
    encoder = writing.encoder(finalize)
    writing.write_pair(
        request,
        base,
        writing.encoded(request, finalize, encoder),
        lambda: key_json(writing.name, finalize.sidecar, encoder),
    )


def write_packed(
    request: StoredRequest,
    finalizes: list[CaptureFinalize],
    writing: Writing,
    folder: Path,
) -> None:
    """Write all keys of the request to one file."""
    base = f"{folder}/packed{stage_suffix(finalizes[0].sidecar)}"
    shared = request_facts([finalize.sidecar for finalize in finalizes])
    entries: list[dict[str, Any]] = []
    facts = {"layout": "packed", "request_id": writing.name, **shared}
    rows = keys_in_turn(request, finalizes, writing, shared, entries, 0)
    try:
        writing.write_pair(request, base, rows, lambda: {**facts, "entries": entries})
    except OSError as error:
        request.settle_error(message_of(error, f"{base}.bin"))
        return
    first, *others = (finalize.key for finalize in finalizes)
    # Only one result names the file: payloads of all keys are concatenated.
    named = CaptureResult(first, "ok", payload=[f"{base}.bin"])
    request.settle([named, *(CaptureResult(key, "ok") for key in others)])
