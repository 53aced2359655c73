# SPDX-License-Identifier: Apache-2.0
"""A shard of a SAELens data set, whose contexts hold rows of many requests.

Each request's rows follow the previous request's. Rows that do not fill a context when
the shard is sealed are left out, and the results of their requests report it.
"""

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from vllm.v1.capture.consumers.arrow.params import ArrowParams
from vllm.v1.capture.consumers.arrow.saelens import (
    INFO,
    STATE,
    contexts_of,
    hook_name,
    info_of,
    state_of,
)
from vllm.v1.capture.consumers.arrow.shard import BATCH_BYTES, ArrowShard
from vllm.v1.capture.consumers.storage.files import Workspace
from vllm.v1.capture.consumers.storage.request import StoredRequest
from vllm.v1.capture.types import CaptureFinalize, CaptureResult

Columns = dict[str, npt.NDArray[Any]]
IDS = "token_ids"


@dataclass(slots=True)
class _Added:
    """A request whose rows are in the shard."""

    results: list[CaptureResult]
    num_rows: int
    stop: int
    """Number of rows in the shard, up to and including these."""


class ContextShard(ArrowShard):
    """An open shard of contexts; its schema is that of the first request."""

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
        _check(self._folder, self._info)
        self._held: Columns = {}
        self._num_rows = 0
        self._added: list[_Added] = []
        super().__init__(params, workspace, self._folder, "contexts", "arrow")
        self._writer = pa.ipc.new_stream(self._file, self._empty().schema)

    def _empty(self) -> pa.RecordBatch:
        columns = {
            name: np.empty((0, told["shape"][1]), told["dtype"])
            for name, told in self._info["features"].items()
            if name != IDS
        }
        return contexts_of(columns, np.empty(0, np.int32), self._size)

    def append(
        self, request: StoredRequest, name: str, finalizes: list[CaptureFinalize]
    ) -> None:
        """Add the rows of a request; if writing fails, the whole shard is lost.

        The caller holds the lock.

        Raises:
            ValueError: the request has other hook points, or not the same positions
                at all of them; the shard is as it was.

        """
        _check_columns(self._info, _info_of(finalizes, self._size))
        columns = _columns(request, finalizes)
        with self.abandoned_on_failure():
            self._write(columns)
            request.commit()
        count = len(columns[IDS])
        self._num_rows += count
        first, *others = (finalize.key for finalize in finalizes)
        results = [
            CaptureResult(first, "ok", payload=[self._final]),
            *(CaptureResult(key, "ok") for key in others),
        ]
        self._added.append(_Added(results, count, self._num_rows))
        self.num_bytes = self._file.tell()
        self.wait_for_seal(request, results)

    def _write(self, columns: Columns) -> None:
        if self._held:
            columns = {
                name: np.concatenate([self._held[name], rows])
                for name, rows in columns.items()
            }
        whole = len(columns[IDS]) // self._size * self._size
        self._held = {name: rows[whole:].copy() for name, rows in columns.items()}
        if whole:
            values = {name: rows[:whole] for name, rows in columns.items()}
            ids = values.pop(IDS)
            self._writer.write_batch(contexts_of(values, ids, self._size))

    def write_out(self) -> None:
        """Rename the file to its final name, and add it to the data set's lists."""
        written = self._num_rows // self._size * self._size
        if written:
            super().write_out()
            _list(self._folder, self._info, Path(self._final).name)
        else:
            self._drop()
        for added in self._added:
            lost = min(added.stop - written, added.num_rows)
            if lost > 0:
                _mark(added, lost, self._size)


def _mark(added: _Added, lost: int, size: int) -> None:
    """Report in a request's results that some of its rows filled no context."""
    added.results[:] = [
        replace(
            result,
            status="partial_error" if lost < added.num_rows else "error",
            error=f"{lost} of {added.num_rows} rows did not fill a context of {size} "
            "before the shard was sealed; send more requests at a time",
            payload=result.payload if lost < added.num_rows else None,
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


def _check(folder: Path, info: Mapping[str, Any]) -> None:
    path = folder / INFO
    if path.exists():
        _check_columns(json.loads(path.read_text()), info)


def _check_columns(there: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    if there["features"] != new["features"]:
        raise ValueError(
            f"the data set has the columns {_columns_of(there)}, and the request "
            f"{_columns_of(new)}; give it a tag of its own"
        )


def _columns_of(info: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {told['shape']} {told['dtype']}"
        for name, told in info["features"].items()
        if name != IDS
    )


def _list(folder: Path, info: dict[str, Any], file: str) -> None:
    """Add a file to a data set that other processes may also extend."""
    with open(folder / ".index.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _check(folder, info)
        state = folder / STATE
        listed = json.loads(state.read_text())["_data_files"] if state.exists() else []
        _put(folder / INFO, info)
        _put(state, state_of([*(one["filename"] for one in listed), file]))


def _put(path: Path, told: dict[str, Any]) -> None:
    aside = path.with_suffix(".incomplete")
    aside.write_text(json.dumps(told, indent=1))
    os.replace(aside, path)
