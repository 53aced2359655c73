# SPDX-License-Identifier: Apache-2.0
"""The layout `sharded`: many requests in one file, `{tag}/shard-{NNN}-{SEQ}.bin`."""

import contextlib
import json
import os
from collections.abc import Iterable
from itertools import count
from typing import Any

from vllm.v1.capture.consumers.filesystem.file_names import SHARD, files_of
from vllm.v1.capture.consumers.filesystem.layouts import (
    Writing,
    keys_in_turn,
    message_of,
    request_facts,
)
from vllm.v1.capture.consumers.filesystem.params import FilesystemParams
from vllm.v1.capture.consumers.storage.files import Workspace, move_to_new, publish
from vllm.v1.capture.consumers.storage.shards import Shard
from vllm.v1.capture.consumers.storage.stored_request import (
    StoredRequest,
    results_of,
)
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
