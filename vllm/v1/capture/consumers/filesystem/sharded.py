# SPDX-License-Identifier: Apache-2.0
"""Layout `sharded`: many requests in one file, `{tag}/shard-{NNN}-{SEQ}.bin`."""

import contextlib
import json
import os
from collections.abc import Iterable
from functools import partial
from itertools import count
from typing import Any
from zlib import crc32

from vllm.v1.capture.consumers.filesystem.file_names import SHARD, files_of
from vllm.v1.capture.consumers.filesystem.layouts import Writing, stage_suffix
from vllm.v1.capture.consumers.filesystem.packed import keys_in_turn
from vllm.v1.capture.consumers.filesystem.params import FilesystemParams
from vllm.v1.capture.consumers.filesystem.per_file import said
from vllm.v1.capture.consumers.filesystem.sidecar import request_facts
from vllm.v1.capture.consumers.storage.files import Bytes, Workspace, publish, write_all
from vllm.v1.capture.consumers.storage.jobs import Append
from vllm.v1.capture.consumers.storage.request import StoredRequest
from vllm.v1.capture.consumers.storage.shards import Shard, ShardSet
from vllm.v1.capture.types import CaptureFinalize, CaptureResult


class FileShard(Shard):
    """One shard: rows aside, and its index in memory until it is sealed."""

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
        """Have a request's keys written to the end; the lock is held.

        Raises:
            OSError: the shard is as before.

        """
        shared = request_facts([finalize.sidecar for finalize in finalizes])
        entries: list[dict[str, Any]] = []
        start = self.num_bytes
        data = keys_in_turn(request, finalizes, writing, shared, entries, start)
        facts = {"request_id": writing.name, **shared}
        if not writing.fits_in_memory(request):
            self.num_bytes += self._write(data, start)
            self._accept(request, finalizes, facts, entries)
            return
        job = Append(self._fd, start, list(data))
        self.num_bytes += job.num_bytes
        self.pending += 1

        def answer(error: OSError | None) -> None:
            with self.lock:
                self.pending -= 1
                if error is None:
                    self._accept(request, finalizes, facts, entries)
            if error is not None:
                request.settle_error(said(error, self._path))

        try:
            writing.submission.submit(job, answer)
        except OSError:
            self.pending -= 1
            self.num_bytes = start
            raise

    def _write(self, data: Iterable[Bytes], start: int) -> int:
        try:
            return write_all(self._fd, data, self._params.coalesce_max_bytes, start)
        except BaseException:
            if not self.pending:  # nobody writes behind it: give the space back
                os.ftruncate(self._fd, start)
            raise

    def _accept(
        self,
        request: StoredRequest,
        finalizes: list[CaptureFinalize],
        facts: dict[str, Any],
        entries: list[dict[str, Any]],
    ) -> None:
        """The request's bytes are in the file."""
        which = {
            "request_id": facts["request_id"],
            "request": len(self._requests),
        }
        self._entries += [{**which, **entry} for entry in entries]
        self._requests.append(facts)
        # One result carries the file's name, which is known once it is sealed.
        first, *others = (finalize.key for finalize in finalizes)
        named = CaptureResult(first, "ok")
        self._results.append(named)
        self.wait_for_seal(
            request, [named, *(CaptureResult(key, "ok") for key in others)]
        )

    def write_out(self) -> None:
        """Claim the next free number, then write the index."""
        if not self._requests:  # none of them could be written
            os.close(self._fd)
            os.unlink(self._path)
            return
        fsync = self._params.fsync
        index = None
        try:
            # Behind the last row may be what was left of a write that failed.
            os.ftruncate(self._fd, self._end())
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

    def _end(self) -> int:
        return max((e["offset"] + e["nbytes"] for e in self._entries), default=0)

    def _claim(self) -> str:
        for sequence in count(self._next_sequence()):
            base = f"{self._folder}/{self._prefix}-{sequence:05d}"
            if os.path.lexists(f"{base}.json"):
                continue  # A folder of a request may have this name.
            # Another engine may write to the same folder: linking decides.
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


def _link(aside: str, final: str) -> None:
    """As `publish`, but what is aside stays if the name is taken."""
    if os.path.lexists(final):
        raise FileExistsError(final)
    try:
        os.link(aside, final)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        os.rename(aside, final)
    else:
        os.unlink(aside)


class ShardedLayout:
    """The shards under way of one consumer."""

    def __init__(self, params: FilesystemParams) -> None:
        self._params = params
        self.shards: ShardSet[FileShard] = ShardSet(params.shard_max_bytes)

    def write(
        self, request: StoredRequest, finalizes: list[CaptureFinalize], writing: Writing
    ) -> None:
        """Append the request to its shard, which settles it when it is sealed."""
        if not finalizes:
            request.settle(())
            return
        number = crc32(request.request_id.encode()) % self._params.num_shards
        stage = stage_suffix(finalizes[0].sidecar)
        self.shards.add(
            (writing.tag, number),
            partial(
                FileShard,
                self._params,
                writing.workspace,
                writing.tag,
                f"shard{stage}-{number:03d}",
            ),
            lambda shard: shard.append(request, finalizes, writing),
        )
