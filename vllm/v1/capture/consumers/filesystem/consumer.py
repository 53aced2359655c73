# SPDX-License-Identifier: Apache-2.0
"""`FilesystemConsumer`, which writes rows to files in one of three layouts.

`per_file` writes one file of rows and one JSON file per key, `packed` one file with all
keys of a request and one JSON index, `sharded` one file with many requests,
`{tag}/shard-{NNN}-{SEQ}.bin`.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from crc32c import crc32c

from vllm.v1.capture.consumers.filesystem.file_names import SHARD, files_of
from vllm.v1.capture.consumers.filesystem.params import FilesystemParams
from vllm.v1.capture.consumers.filesystem.types import LAYOUTS
from vllm.v1.capture.consumers.storage.consumer import FilesConsumer
from vllm.v1.capture.consumers.storage.files import (
    Workspace,
    move_to_new,
    place_of,
    places_of,
    publish,
    publish_pair,
    sole_writer,
)
from vllm.v1.capture.consumers.storage.shards import Shard
from vllm.v1.capture.consumers.storage.stored_request import (
    StoredRequest,
    results_of,
)
from vllm.v1.capture.delivery.row_bytes import raw_bytes, write_all
from vllm.v1.capture.errors import fail
from vllm.v1.capture.types import (
    CaptureContext,
    CaptureFinalize,
    CaptureResult,
    CaptureSpec,
)
from vllm.v1.residual.native import Bytes
from vllm.v1.residual.plugin_errors import described

REQUEST_FACTS = (
    "layer_convention",
    "model",
    "dtype",
    "num_prompt_tokens",
    "num_generated_tokens",
    "finish_reason",
    "vllm_internal_request_id",
    "client_request_id",
    "sample_index",
    "pipeline_parallel_rank",
    "pipeline_parallel_size",
)
"""Fields that are the same for all keys of a request."""

ROW_FACTS = ("positions", "token_ids")
"""Fields with one value per row."""


class KeyBytes:
    """The bytes of a key, counted and summed up while they are written."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """Bytes that `of` has yielded so far."""
        self.checksum = crc32c(b"")
        """CRC32C of these bytes, with the reflected polynomial of RFC 3720, 12.1."""

    def of(self, blocks: Iterable[torch.Tensor]) -> Iterator[Bytes]:
        """Yield the bytes of rows `[rows, width]`."""
        for block in blocks:
            data = raw_bytes(block)
            self.num_bytes += len(data)
            self.checksum = crc32c(data, self.checksum)
            yield data


@dataclass(frozen=True, slots=True)
class Writing:
    """The settings for writing the rows of one request."""

    params: FilesystemParams
    workspace: Workspace
    tag: str
    name: str
    """The request's name, as a part of a path."""

    @property
    def max_bytes(self) -> int:
        """Maximum bytes per system call."""
        return self.params.coalesce_max_bytes

    def write_pair(
        self,
        request: StoredRequest,
        base: str,
        rows: Iterable[Bytes],
        index: Callable[[], dict[str, Any]],
    ) -> None:
        """Write `{base}.bin` and `{base}.json`.

        Args:
            request: the request, which may fail with a timeout meanwhile.
            base: the path without its suffix.
            rows: the bytes of the `.bin` file.
            index: returns the content of the `.json` file; called after all of `rows`
                were consumed.

        Raises:
            OSError: neither file exists.

        """
        params, workspace = self.params, self.workspace
        asides = [workspace.write(rows, self.max_bytes, params.fsync)]
        try:
            text = json.dumps(index()).encode()
            asides.append(workspace.write([text], self.max_bytes, params.fsync))
            request.commit()
            publish_pair(
                (asides[0], f"{base}.bin"),
                (asides[1], f"{base}.json"),
                replace=params.on_collision == "overwrite",
                fsync=params.fsync,
            )
        except BaseException:
            for path in asides:
                if os.path.lexists(path):
                    os.unlink(path)
            raise


def keys_in_turn(
    request: StoredRequest,
    finalizes: list[CaptureFinalize],
    writing: Writing,
    shared: dict[str, Any],
    entries: list[dict[str, Any]],
    offset: int,
) -> Iterator[Bytes]:
    """Yield the bytes of all keys, consecutively.

    Args:
        request: the request.
        finalizes: its keys.
        writing: the settings.
        shared: facts that are not repeated in the entries.
        entries: extended by each key's entry after its bytes were consumed.
        offset: the first key's offset in the file.

    """
    for finalize in finalizes:
        written = KeyBytes()
        yield from written.of(request.blocks(finalize, writing.max_bytes))
        entries.append(entry(finalize.sidecar, shared, offset, written))
        offset += written.num_bytes


def key_json(
    request_id: str, sidecar: dict[str, Any], written: KeyBytes
) -> dict[str, Any]:
    """The JSON of a file with one key (layout `per_file`).

    Args:
        request_id: the request's name.
        sidecar: the key's sidecar.
        written: its bytes, after all of them were written.

    """
    facts = {name: sidecar[name] for name in (*REQUEST_FACTS, *ROW_FACTS)}
    return {"request_id": request_id, **_key_facts(sidecar, written), **facts}


def request_facts(sidecars: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The facts that all keys of a request share; row facts only if all agree."""
    first = sidecars[0]
    facts = {name: first[name] for name in REQUEST_FACTS}
    for name in ROW_FACTS:
        if all(sidecar[name] == first[name] for sidecar in sidecars):
            facts[name] = first[name]
    return facts


def entry(
    sidecar: dict[str, Any],
    shared: dict[str, Any],
    offset: int,
    written: KeyBytes,
) -> dict[str, Any]:
    """The index entry of a key in a file with several keys.

    Args:
        sidecar: the key's sidecar.
        shared: the result of `request_facts`, which is not repeated.
        offset: of the key's first byte in the file.
        written: its bytes, after all of them were written.

    """
    own = {name: sidecar[name] for name in ROW_FACTS if name not in shared}
    if sidecar["dtype"] != shared["dtype"]:
        own["dtype"] = sidecar["dtype"]
    place = {"offset": offset, "nbytes": written.num_bytes}
    return {**_key_facts(sidecar, written), **place, **own}


def _key_facts(sidecar: dict[str, Any], written: KeyBytes) -> dict[str, Any]:
    """What is said of a key in any file."""
    facts = {
        "layer": sidecar["layer"],
        "hook": sidecar["hook"],
        "shape": [sidecar["num_rows"], sidecar["hidden_size"]],
        "crc32c": written.checksum,
    }
    # Of rows of some heads, of results of readouts, and of rows that lack some.
    said = {"heads": "heads", "readout": "readout", "capture_note": "note"}
    return facts | {
        ours: sidecar[name] for name, ours in said.items() if name in sidecar
    }


def message_of(error: OSError, name: str) -> str:
    """The message for results about an error in writing the file `name`."""
    if isinstance(error, FileExistsError):
        return f"FileExistsError: {name} exists already (on_collision=error)"
    return described(error)


def stage_suffix(sidecar: dict[str, Any]) -> str:
    """A suffix such as `-pp00` with pipeline parallelism, otherwise empty."""
    if sidecar["pipeline_parallel_size"] == 1:
        return ""
    return f"-pp{sidecar['pipeline_parallel_rank']:02d}"


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
    written = KeyBytes()
    writing.write_pair(
        request,
        base,
        written.of(request.blocks(finalize, writing.max_bytes)),
        lambda: key_json(writing.name, finalize.sidecar, written),
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
    request.settle(results_of(finalizes, [f"{base}.bin"]))


class FileShard(Shard):
    """One shard: an incomplete file of rows, and its index in memory until sealing."""

    def __init__(self, writing: Writing, prefix: str) -> None:
        super().__init__()
        self._fsync = writing.params.fsync
        self._workspace = writing.workspace
        self._folder = self._workspace.folder(writing.tag)
        self._prefix = prefix
        self._path, self._fd = self._workspace.create()
        self._requests: list[dict[str, Any]] = []
        self._entries: list[dict[str, Any]] = []
        self._results: list[CaptureResult] = []

    def append(
        self, request: StoredRequest, finalizes: list[CaptureFinalize], writing: Writing
    ) -> None:
        """Write a request behind the others; the caller holds the lock."""
        shared = request_facts([finalize.sidecar for finalize in finalizes])
        entries: list[dict[str, Any]] = []
        data = keys_in_turn(
            request, finalizes, writing, shared, entries, self.num_bytes
        )
        try:
            write_all(self._fd, data, writing.max_bytes, self.num_bytes)
            request.commit()
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self.num_bytes)
            request.settle_error(message_of(error, self._path))
            return
        self.num_bytes = _end(entries)
        which = {"request_id": writing.name, "request": len(self._requests)}
        self._entries += [{**which, **entry} for entry in entries]
        self._requests.append({"request_id": writing.name, **shared})
        # One result names the file; its name is known once the shard is sealed.
        results = results_of(finalizes)
        self._results.append(results[0])
        self.wait_for_seal(request, results)

    def write_out(self) -> None:
        """Claim the next free sequence number, and write the index."""
        if not self._requests:  # All writes have failed.
            os.close(self._fd)
            os.unlink(self._path)
            return
        fsync = self._fsync
        index = None
        try:
            # A failed write may have left bytes after the last row.
            os.ftruncate(self._fd, _end(self._entries))
            if fsync:
                os.fsync(self._fd)
            text = json.dumps(
                {
                    "layout": "sharded",
                    "dtype": self._requests[0]["dtype"],
                    "layer_convention": self._requests[0]["layer_convention"],
                    "model": self._requests[0]["model"],
                    "requests": self._requests,
                    "entries": self._entries,
                }
            ).encode()
            index = self._workspace.write([text], len(text), fsync)
            base = self._claim()
        except BaseException:
            for path in (self._path, index):
                if path is not None:
                    with contextlib.suppress(OSError):
                        os.unlink(path)
            raise
        finally:
            os.close(self._fd)
        try:
            publish(index, f"{base}.json", replace=True, fsync=fsync)
        except BaseException:
            os.unlink(f"{base}.bin")
            raise
        for result in self._results:
            result.payload = [f"{base}.bin"]

    def _claim(self) -> str:
        for sequence in count(self._next_sequence()):
            base = f"{self._folder}/{self._prefix}-{sequence:05d}"
            if os.path.lexists(f"{base}.json"):
                continue  # A request's directory may have this name.
            # Another engine may use the same directory: the link is atomic.
            try:
                move_to_new(self._path, f"{base}.bin")
            except FileExistsError:
                continue
            return base
        raise AssertionError("count() does not end")

    def _next_sequence(self) -> int:
        taken = [
            int(found[2])
            for found in files_of(self._folder, SHARD)
            if found[1] == self._prefix
        ]
        return max(taken, default=-1) + 1


def _end(entries: Iterable[dict[str, Any]]) -> int:
    return max((e["offset"] + e["nbytes"] for e in entries), default=0)


class FilesystemConsumer(FilesConsumer):
    """Writes the rows of each request to files once it has ended.

    A `CaptureSink`. The result's payload is the list of paths of the `.bin` files,
    which are complete when the result is returned. For the formats see
    `docs/capture/files.md`.
    """

    params_class = FilesystemParams
    _params: FilesystemParams
    more_keys = ("layout",)

    def _check(
        self, raw: dict[str, Any], spec: CaptureSpec, ctx: CaptureContext, where: str
    ) -> None:
        """Check the layout."""
        layout = raw.get("layout")
        if layout is not None and layout not in LAYOUTS:
            raise fail(
                f"{where}.layout must be one of {list(LAYOUTS)}",
                f"{where}.layout",
                layout,
            )

    def claimed_places(self, raw: Any, request_id: str, num_samples: int) -> list[str]:
        """The paths that a request's rows are written to; see `PathLocks`."""
        return places_of(raw, request_id, num_samples, self._params.default_tag)

    def publish(self, request: StoredRequest, finalizes: list[CaptureFinalize]) -> None:
        """Write the rows of a request."""
        sidecar = finalizes[0].sidecar
        client = sidecar.get("client_spec") or {}
        layout = client.get("layout") or self._params.default_layout
        tag, name = place_of(sidecar, self._params.default_tag)
        writing = Writing(self._params, self._workspace, tag, name)
        if layout == "sharded":
            self._append(request, finalizes, writing)
            return
        folder = self._workspace.folder(tag, name)
        write = write_packed if layout == "packed" else write_per_file
        with sole_writer(folder):
            write(request, finalizes, writing, folder)

    def _append(
        self, request: StoredRequest, finalizes: list[CaptureFinalize], writing: Writing
    ) -> None:
        """Append the request to a shard, which settles it when it is sealed."""
        shards, first = self._params.num_shards, crc32(request.request_id.encode())
        prefix = f"shard{stage_suffix(finalizes[0].sidecar)}"
        self._shards.add(
            # A file system lets one thread at a time write to a file.
            [(writing.tag, (first + n) % shards) for n in range(shards)],
            lambda key: FileShard(writing, f"{prefix}-{key[1]:03d}"),
            lambda shard: shard.append(request, finalizes, writing),
        )
