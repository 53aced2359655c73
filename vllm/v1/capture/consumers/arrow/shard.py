# SPDX-License-Identifier: Apache-2.0
"""Files with rows of many requests: tables, in Parquet or Arrow IPC."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from vllm.v1.capture.consumers.arrow.params import ArrowParams
from vllm.v1.capture.consumers.arrow.row_file import MOST_BYTES, RowFile
from vllm.v1.capture.consumers.arrow.table import (
    IntColumns,
    Span,
    batch_of,
    is_stored_as_captured,
    schema_of,
    values_in,
    values_of,
)
from vllm.v1.capture.consumers.storage.encode import joined
from vllm.v1.capture.consumers.storage.files import Workspace, publish
from vllm.v1.capture.consumers.storage.request import StoredRequest
from vllm.v1.capture.consumers.storage.shards import Shard
from vllm.v1.capture.types import CaptureFinalize, CaptureResult

BATCH_BYTES = 16 << 20
"""Approximate size of a batch of rows."""

_ENDINGS = {"parquet": "parquet", "ipc": "arrow"}


class ArrowShard(Shard):
    """An open file in a shared folder, which `_writer` writes batches to."""

    _writer: Any

    def __init__(
        self,
        params: ArrowParams,
        workspace: Workspace,
        folder: Path,
        name: str,
        ending: str,
    ) -> None:
        """Open a temporary file.

        Args:
            params: of the consumer.
            workspace: the consumer's root.
            folder: where the file appears when it is complete.
            name: how its name begins.
            ending: how it ends, without a dot.

        Raises:
            OSError: it cannot be written.

        """
        super().__init__()
        self._params = params
        # Random, because independent engines may share a directory.
        self._final = str(folder / f"{name}-{uuid4().hex}.{ending}")
        self._path, fd = workspace.create()
        self._file = self._opened(fd)

    def _opened(self, fd: int) -> Any:
        """The file object for Arrow's writer, which owns the descriptor `fd`."""
        os.close(fd)
        return pa.OSFile(self._path, "wb")  # Writes without the GIL.

    @contextlib.contextmanager
    def abandoned_on_failure(self) -> Iterator[None]:
        """Drop the file and fail all its requests if the block raises."""
        try:
            yield
        except BaseException:
            self.sealed = self.written_out = True
            for request, _ in self._waiting:
                request.settle_error("the table it shared with others was not written")
            self._drop()
            raise

    def _drop(self) -> None:
        with contextlib.suppress(Exception):
            self._writer.close()
        with contextlib.suppress(Exception):
            self._file.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def write_out(self) -> None:
        """Write the footer, and rename the file to its final name."""
        try:
            self._writer.close()
            self._file.close()
            if self._params.fsync:
                fd = os.open(self._path, os.O_RDONLY)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)
            publish(self._path, self._final, replace=False, fsync=self._params.fsync)
        except BaseException:
            self._drop()
            raise


class TableShard(ArrowShard):
    """An open table."""

    def __init__(
        self,
        params: ArrowParams,
        workspace: Workspace,
        tag: str,
        sidecar: dict[str, Any],
    ) -> None:
        name = f"rows-pp{sidecar['pipeline_parallel_rank']:02d}"
        folder = workspace.folder(tag)
        self._schema = schema_of(sidecar, params.bfloat16 == "float32")
        self._kind = self._schema.field("values").type
        plain = params.format == "ipc" and params.compression == "none"
        self._rows: RowFile | None = None
        """Takes rows as they are; None if they are encoded."""
        self._takes_rows = plain and is_stored_as_captured(sidecar, self._kind)
        super().__init__(params, workspace, folder, name, _ENDINGS[params.format])
        self._writer = self._open_writer()

    def _opened(self, fd: int) -> Any:
        if not self._takes_rows:
            return super()._opened(fd)
        self._rows = RowFile(fd)
        return pa.PythonFile(self._rows, "w")

    def _open_writer(self) -> Any:
        compression = self._params.compression
        if self._params.format == "parquet":
            # Activations do not repeat, so a dictionary would only cost time. So would
            # pages smaller than a batch.
            return pq.ParquetWriter(
                self._file,
                self._schema,
                compression=compression,
                use_dictionary=["request_id", "hook"],
                write_statistics=["request_id", "layer", "hook", "position"],
                data_page_size=2 * BATCH_BYTES,
                column_encoding={self._values_path(): "PLAIN"},
            )
        codec = None if compression == "none" else compression
        options = pa.ipc.IpcWriteOptions(compression=codec)
        return pa.ipc.new_file(self._file, self._schema, options=options)

    def _values_path(self) -> str:
        """The Parquet path of the column of values."""
        is_list = pa.types.is_fixed_size_list(self._kind)
        return "values.list.element" if is_list else "values"

    def append(
        self, request: StoredRequest, name: str, finalizes: list[CaptureFinalize]
    ) -> None:
        """Write the keys of a request; on failure the whole table is lost.

        The caller holds the lock.
        """
        with self.abandoned_on_failure():
            for batch in self._batches(request, name, finalizes):
                if self._params.format == "parquet":
                    self._writer.write_batch(batch, row_group_size=batch.num_rows)
                else:
                    self._writer.write_batch(batch)
            request.commit()
        self.num_bytes = self._file.tell()
        first, *others = (finalize.key for finalize in finalizes)
        self.wait_for_seal(
            request,
            [
                CaptureResult(first, "ok", payload=[self._final]),
                *(CaptureResult(key, "ok") for key in others),
            ],
        )

    def _batches(
        self, request: StoredRequest, name: str, finalizes: list[CaptureFinalize]
    ) -> Iterator[pa.RecordBatch]:
        """The rows of a request; a batch must be written before the next is taken."""
        ints, kind = IntColumns(), self._kind
        if self._rows is None:
            for finalize in finalizes:
                done = 0
                blocks = request.blocks(finalize, BATCH_BYTES)
                for rows in joined(blocks, BATCH_BYTES):
                    span = Span(finalize.sidecar, done, len(rows))
                    values = values_of(rows, kind)
                    yield batch_of(name, [span], values, self._schema, ints)
                    done += len(rows)
            return
        for spans, blocks in _grouped(request, finalizes):
            buffer = self._rows.placeholder(blocks)
            values = values_in(buffer, sum(map(len, blocks)), kind)
            yield batch_of(name, spans, values, self._schema, ints)


def _grouped(
    request: StoredRequest, finalizes: Sequence[CaptureFinalize]
) -> Iterator[tuple[list[Span], list[torch.Tensor]]]:
    """Rows of several keys, about `MOST_BYTES` at a time."""
    spans: list[Span] = []
    blocks: list[torch.Tensor] = []
    size = 0
    for finalize in finalizes:
        done = 0
        for whole in request.blocks(finalize, MOST_BYTES):
            for block in whole.split(max(MOST_BYTES // whole[:1].nbytes, 1)):
                if blocks and size + block.nbytes > MOST_BYTES:
                    yield spans, blocks
                    spans, blocks, size = [], [], 0
                spans.append(Span(finalize.sidecar, done, len(block)))
                blocks.append(block)
                done += len(block)
                size += block.nbytes
    if blocks:
        yield spans, blocks
