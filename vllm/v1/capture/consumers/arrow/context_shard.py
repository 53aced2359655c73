# SPDX-License-Identifier: Apache-2.0
"""A shard of a SAELens data set, whose contexts hold rows of many requests.

Each request's rows follow the previous request's. Rows that fill no context when the
last request has ended are left out, and the results of their requests report it.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from vllm.v1.capture.consumers.arrow.params import ArrowParams
from vllm.v1.capture.consumers.arrow.saelens import (
    IDS,
    add_file,
    check,
    check_columns,
    contexts_of,
    hook_name,
    info_of,
)
from vllm.v1.capture.consumers.arrow.shard import BATCH_BYTES, ArrowShard
from vllm.v1.capture.consumers.storage import shards
from vllm.v1.capture.consumers.storage.files import Workspace
from vllm.v1.capture.consumers.storage.stored_request import StoredRequest
from vllm.v1.capture.types import CaptureFinalize, CaptureResult

Columns = dict[str, npt.NDArray[Any]]


@dataclass(slots=True, eq=False)
class _Added:
    """A request whose rows are in the shard."""

    request: StoredRequest
    results: list[CaptureResult]
    start: int
    """Number of rows that were added to the shard before."""
    stop: int
    """The same, up to and including these."""
    files: list[str]
    """The complete files that hold rows of it; the payload of its first result."""


class ContextShard(ArrowShard):
    """An open shard of contexts; its schema is that of the first request.

    While requests run or keep coming, sealing completes a file with the contexts that
    are full. The rows left over go to the shard's next file, and so does the result of
    each request that owns some of them.
    """

    def __init__(
        self,
        params: ArrowParams,
        workspace: Workspace,
        tag: str,
        finalizes: list[CaptureFinalize],
    ) -> None:
        """Open a file.

        Raises:
            OSError: it cannot be written.
            ValueError: the folder's data set has other columns.

        """
        assert params.context_size is not None, "checked with the parameters"
        self._size = params.context_size
        self._info = _info_of(finalizes, self._size)
        self._folder = workspace.folder(tag)
        check(self._folder, self._info)
        self._left: Columns = {}
        """The rows that fill no context yet."""
        self._num_rows = 0
        """Rows that were added, to all files."""
        self._complete = 0
        """Rows in files that are complete."""
        self._added: list[_Added] = []
        """The requests that have no result yet."""
        self._gives_up: int | None = None
        """If `_num_rows` is this, sealing discards the remaining rows."""
        super().__init__(params, workspace, self._folder, "contexts", "arrow")
        self._writer = self._open_writer()

    def _open_writer(self) -> Any:
        columns = {
            name: np.empty((0, feature["shape"][1]), feature["dtype"])
            for name, feature in self._info["features"].items()
            if name != IDS
        }
        empty = contexts_of(columns, np.empty(0, np.int32), self._size)
        return pa.ipc.new_stream(self._file, empty.schema)

    @property
    def _full(self) -> int:
        """Rows in full contexts, of all files."""
        return self._num_rows // self._size * self._size

    def append(
        self, request: StoredRequest, name: str, finalizes: list[CaptureFinalize]
    ) -> None:
        """Add the rows of a request; if writing fails, the whole shard is lost.

        The caller holds the lock.

        Raises:
            ValueError: the request has other hook points, or not the same positions
                at all of them; the shard is as it was.

        """
        check_columns(self._info, _info_of(finalizes, self._size))
        columns = _columns(request, finalizes)
        with self.abandoned_on_failure():
            self._write(columns)
            request.commit()
        self._last = monotonic()  # First: see `is_due`.
        start = self._num_rows
        self._num_rows += len(columns[IDS])
        first, *others = (finalize.key for finalize in finalizes)
        files: list[str] = []
        results = [
            CaptureResult(first, "ok", payload=files),
            *(CaptureResult(key, "ok") for key in others),
        ]
        self._added.append(_Added(request, results, start, self._num_rows, files))
        self.num_bytes = self._file.tell()
        self.wait_for_seal(request, results)

    def _write(self, columns: Columns) -> None:
        if self._left:
            columns = {
                name: np.concatenate([self._left[name], rows])
                for name, rows in columns.items()
            }
        whole = len(columns[IDS]) // self._size * self._size
        self._left = {name: rows[whole:].copy() for name, rows in columns.items()}
        if whole:
            values = {name: rows[:whole] for name, rows in columns.items()}
            ids = values.pop(IDS)
            self._writer.write_batch(contexts_of(values, ids, self._size))

    def is_due(self, now: float, closing: bool, running: bool) -> bool:
        """Whether to call `seal`, and whether that discards the remaining rows.

        They wait while requests run or have just been added, but not so long that
        their requests fail with a timeout.
        """
        num_rows = self._num_rows  # Rows that are added after this are not discarded.
        is_idle = now - self._last > shards.IDLE_SECONDS
        ended = [one.request.ended_at or now for one in list(self._added)]
        is_old = now - min(ended, default=now) > self._params.timeout_seconds / 2
        gives_up = closing or is_old or (is_idle and not running)
        self._gives_up = num_rows if gives_up else None
        if not gives_up and self._full == self._complete:
            return False  # The file has no context.
        return super().is_due(now, closing, running=True)

    def seal(self) -> None:
        """Complete the file, and open the next one if rows are carried over.

        The caller holds the lock.
        """
        if self._gives_up == self._num_rows or self._full == self._num_rows:
            super().seal()
            return
        self._asked = 0.0
        if self._full == self._complete or self.sealed:
            return
        try:
            for added in self._complete_file():
                added.request.settle(added.results)
            self._waiting = [(one.request, one.results) for one in self._added]
            self.open_file()
            self._writer = self._open_writer()
        except Exception as error:
            self.sealed = self.written_out = True
            for request, _ in self._waiting:
                request.settle_error(f"{type(error).__name__}: {error}")
        self.num_bytes, self._first = 0, monotonic()

    def write_out(self) -> None:
        """Complete the last file, and report the rows that fill no context."""
        if self._full > self._complete:
            self._complete_file()
        else:
            self._drop()
        for added in self._added:
            lost = added.stop - max(added.start, self._complete)
            if lost > 0:
                _mark(added, lost, self._size)

    def _complete_file(self) -> list[_Added]:
        """Give the file its final name, and add it to the data set's lists.

        Returns:
            The requests all rows of which are in complete files; others still wait.

        """
        super().write_out()
        add_file(self._folder, self._info, Path(self._final).name)
        self._complete = self._full
        for added in self._added:
            if added.start < self._complete:
                added.files.append(self._final)
        done = [one for one in self._added if one.stop <= self._complete]
        self._added = [one for one in self._added if one.stop > self._complete]
        return done


def _mark(added: _Added, lost: int, size: int) -> None:
    """Report in a request's results that some of its rows filled no context."""
    num_rows = added.stop - added.start
    added.results[:] = [
        replace(
            result,
            status="partial_error" if lost < num_rows else "error",
            error=f"{lost} of {num_rows} rows did not fill a context of {size} "
            "before the last request had ended; send more requests at a time",
            payload=result.payload if lost < num_rows else None,
        )
        for result in added.results
    ]


def _info_of(finalizes: list[CaptureFinalize], size: int) -> dict[str, Any]:
    sidecar = finalizes[0].sidecar
    names = sorted(hook_name(*finalize.key[1:]) for finalize in finalizes)
    dtype = _stored(sidecar["dtype"])
    about = {key: sidecar[key] for key in ("model", "layer_convention")}
    return info_of(names, size, sidecar["hidden_size"], dtype, json.dumps(about))


def _stored(dtype: str) -> str:
    """Arrow has no bfloat16; float32 holds it exactly."""
    return "float16" if dtype == "float16" else "float32"


def _columns(request: StoredRequest, finalizes: list[CaptureFinalize]) -> Columns:
    sidecar = finalizes[0].sidecar
    if any(one.sidecar["positions"] != sidecar["positions"] for one in finalizes):
        raise ValueError("layout=saelens needs the same positions at every hook point")
    kind = getattr(torch, _stored(sidecar["dtype"]))
    empty = torch.empty(0, sidecar["hidden_size"], dtype=kind)
    columns: Columns = {
        hook_name(*one.key[1:]): torch.cat(
            [empty, *(rows.to(kind) for rows in request.blocks(one, BATCH_BYTES))]
        ).numpy()
        for one in sorted(finalizes, key=lambda one: hook_name(*one.key[1:]))
    }
    # A prompt given as embeddings has no ids.
    ids = [-1 if token is None else token for token in sidecar["token_ids"]]
    columns[IDS] = np.array(ids, np.int32)
    return columns
