# SPDX-License-Identifier: Apache-2.0
"""The layout `sharded`: many requests in one file, `{tag}/shard-{NNN}-{SEQ}.bin`."""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from typing import Any
from zlib import crc32

import torch

from vllm.v1.capture.consumers.filesystem.file_names import SHARD, files_of
from vllm.v1.capture.consumers.filesystem.layouts import (
    Writing,
    keys_in_turn,
    message_of,
    request_facts,
    stage_suffix,
)
from vllm.v1.capture.consumers.filesystem.params import FilesystemParams
from vllm.v1.capture.consumers.storage.files import Workspace, publish
from vllm.v1.capture.consumers.storage.shards import Shard, ShardSet
from vllm.v1.capture.consumers.storage.stored_request import StoredRequest
from vllm.v1.capture.consumers.storage.threads import Task
from vllm.v1.capture.delivery.row_bytes import write_all
from vllm.v1.capture.types import CaptureFinalize, CaptureResult


class FileShard(Shard):
    """One shard: an incomplete file of rows, and its index in memory until sealing."""

    def __init__(
        self, params: FilesystemParams, workspace: Workspace, tag: str, prefix: str
    ) -> None:
        super().__init__()
        self._params = params
        self._workspace = workspace
        self._folder = workspace.folder(tag)
        self._prefix = prefix
        self._path, self._fd = workspace.create()
        self._requests: list[dict[str, Any]] = []
        self._entries: list[dict[str, Any]] = []
        self._results: list[CaptureResult] = []

    def reserve(self, num_bytes: int) -> int:
        """Reserve bytes at the end for a request; the caller holds the lock.

        Returns:
            The offset of the reserved bytes.

        """
        start = self.num_bytes
        self.num_bytes += num_bytes
        self.pending += 1
        return start

    def write(
        self,
        request: StoredRequest,
        finalizes: list[CaptureFinalize],
        writing: Writing,
        start: int,
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Write keys at the offset `start`.

        Returns:
            The facts of the request, and the entries of its keys.

        Raises:
            OSError: the write failed; bytes that were written are in no index.

        """
        shared = request_facts([finalize.sidecar for finalize in finalizes])
        entries: list[dict[str, Any]] = []
        data = keys_in_turn(request, finalizes, writing, shared, entries, start)
        write_all(self._fd, data, writing.max_bytes, start)
        return {"request_id": writing.name, **shared}, entries

    def accept(
        self,
        request: StoredRequest,
        finalizes: list[CaptureFinalize],
        facts: dict[str, Any],
        entries: list[dict[str, Any]],
    ) -> None:
        """Add a request whose bytes were written; the caller holds the lock."""
        self.pending -= 1
        self.num_bytes = max(self.num_bytes, _end(entries))
        self._accept(request, finalizes, facts, entries)
        if self.sealed or self.num_bytes >= self._params.shard_max_bytes:
            self.seal()

    def give_up(self, request: StoredRequest, start: int, error: OSError) -> None:
        """Fail a request that could not be written; the caller holds the lock."""
        self.pending -= 1
        if not self.pending:  # No other write is in progress, so truncate.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, _end(self._entries))
            self.num_bytes = _end(self._entries)
        request.settle_error(message_of(error, self._path))
        if self.sealed:
            self.seal()

    def _accept(
        self,
        request: StoredRequest,
        finalizes: list[CaptureFinalize],
        facts: dict[str, Any],
        entries: list[dict[str, Any]],
    ) -> None:
        """Add a request to the index."""
        which = {
            "request_id": facts["request_id"],
            "request": len(self._requests),
        }
        self._entries += [{**which, **entry} for entry in entries]
        self._requests.append(facts)
        # One result names the file; its name is known once the shard is sealed.
        first, *others = (finalize.key for finalize in finalizes)
        named = CaptureResult(first, "ok")
        self._results.append(named)
        self.wait_for_seal(
            request, [named, *(CaptureResult(key, "ok") for key in others)]
        )

    def write_out(self) -> None:
        """Claim the next free sequence number, and write the index."""
        if not self._requests:  # All writes have failed.
            os.close(self._fd)
            os.unlink(self._path)
            return
        fsync = self._params.fsync
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
                _link(self._path, f"{base}.bin")
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


def _link(aside: str, final: str) -> None:
    """Like `publish`, but keeps the incomplete file if the name is taken."""
    if os.path.lexists(final):
        raise FileExistsError(final)
    try:
        os.link(aside, final)
    except FileExistsError:
        raise
    except OSError:  # The file system does not support hard links.
        os.rename(aside, final)
    else:
        os.unlink(aside)


class ShardedLayout:
    """The open shards of one consumer."""

    def __init__(self, params: FilesystemParams) -> None:
        self._params = params
        self._shards: ShardSet[FileShard] = ShardSet(params.shard_max_bytes)

    def due(self, now: float, closing: bool, running: bool) -> Sequence[Task]:
        """Tasks that seal the shards that are due."""
        return self._shards.due(now, closing, running)

    def write(
        self, request: StoredRequest, finalizes: list[CaptureFinalize], writing: Writing
    ) -> None:
        """Append the request to a shard, which settles it when it is sealed."""
        if not finalizes:
            request.settle(())
            return
        tag, shards = writing.tag, self._params.num_shards
        first = crc32(request.request_id.encode())
        numbers = [(first + n) % shards for n in range(shards)]
        _, number = self._shards.idlest([(tag, n) for n in numbers])
        new = partial(
            FileShard,
            self._params,
            writing.workspace,
            writing.tag,
            f"shard{stage_suffix(finalizes[0].sidecar)}-{number:03d}",
        )
        size = encoded_bytes(finalizes, writing)
        if size is None:
            self._write_alone(request, finalizes, writing, number, new)
            return
        start, reserved = 0, size

        def reserve(shard: FileShard) -> None:
            nonlocal start
            start = shard.reserve(reserved)

        shard = self._shards.add([(writing.tag, number)], new, reserve)
        try:
            facts, entries = shard.write(request, finalizes, writing, start)
            request.commit()
        except OSError as error:
            with shard.lock:
                shard.give_up(request, start, error)
            return
        with shard.lock:
            shard.accept(request, finalizes, facts, entries)

    def _write_alone(
        self,
        request: StoredRequest,
        finalizes: list[CaptureFinalize],
        writing: Writing,
        number: int,
        new: Callable[[], FileShard],
    ) -> None:
        """Write keys whose encoded size is unknown, while holding the shard's lock."""

        def work(shard: FileShard) -> None:
            start = shard.reserve(0)
            try:
                facts, entries = shard.write(request, finalizes, writing, start)
                request.commit()
            except OSError as error:
                shard.give_up(request, start, error)
            else:
                shard.accept(request, finalizes, facts, entries)

        self._shards.add([(writing.tag, number)], new, work)


def encoded_bytes(finalizes: list[CaptureFinalize], writing: Writing) -> int | None:
    """The encoded size of the keys in bytes; None if it depends on their values."""
    total = 0
    for finalize in finalizes:
        sidecar = finalize.sidecar
        dtype = getattr(torch, sidecar["dtype"])
        codec = writing.codec_of(finalize)
        row_bytes = codec.row_bytes(sidecar["hidden_size"], dtype)
        if row_bytes is None:
            return None
        total += sidecar["num_rows"] * row_bytes
    return total
