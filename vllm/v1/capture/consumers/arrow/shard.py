# SPDX-License-Identifier: Apache-2.0
"""Files with rows of many requests: tables, in Parquet or Arrow IPC."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from vllm.v1.capture.consumers.arrow.params import ArrowParams
from vllm.v1.capture.consumers.arrow.table import batch_of, schema_of
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
        os.close(fd)
        self._file = pa.OSFile(self._path, "wb")  # Writes without the GIL.

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
        super().__init__(params, workspace, folder, name, _ENDINGS[params.format])
        self._schema = schema_of(sidecar, params.bfloat16 == "float32")
        self._writer = self._open_writer()

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
        is_list = pa.types.is_fixed_size_list(self._schema.field("values").type)
        return "values.list.element" if is_list else "values"

    def append(
        self, request: StoredRequest, name: str, finalizes: list[CaptureFinalize]
    ) -> None:
        """Write the keys of a request; on failure the whole table is lost.

        The caller holds the lock.
        """
        with self.abandoned_on_failure():
            for finalize in finalizes:
                self._append_key(request, name, finalize)
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

    def _append_key(
        self, request: StoredRequest, name: str, finalize: CaptureFinalize
    ) -> None:
        done = 0
        for rows in joined(request.blocks(finalize, BATCH_BYTES), BATCH_BYTES):
            batch = batch_of(name, finalize, done, rows, self._schema)
            if self._params.format == "parquet":
                self._writer.write_batch(batch, row_group_size=len(rows))
            else:
                self._writer.write_batch(batch)
            done += len(rows)
