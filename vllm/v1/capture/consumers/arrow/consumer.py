# SPDX-License-Identifier: Apache-2.0
"""`ArrowConsumer`, which writes files that common data tools can open."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from vllm.v1.capture.consumers.arrow.readouts import (
    Column,
    Values,
    columns_of,
    is_readout,
    tokens_of,
    values_by_tap,
)
from vllm.v1.capture.consumers.arrow.safetensors_file import write_safetensors
from vllm.v1.capture.consumers.arrow.table import batch_of, in_batches, schema_of
from vllm.v1.capture.consumers.storage.consumer import FilesConsumer
from vllm.v1.capture.consumers.storage.files import (
    Workspace,
    place_of,
    places_of,
    publish,
    sync,
)
from vllm.v1.capture.consumers.storage.options import Options
from vllm.v1.capture.consumers.storage.params import StorageParams
from vllm.v1.capture.consumers.storage.shards import Shard
from vllm.v1.capture.consumers.storage.stored_request import (
    StoredRequest,
    results_of,
)
from vllm.v1.capture.errors import fail
from vllm.v1.capture.types import CaptureContext, CaptureFinalize, CaptureSpec
from vllm.v1.residual.tap import width_at

BATCH_BYTES = 16 << 20
"""Approximate size of a batch of rows."""

_ENDINGS = {"parquet": "parquet", "ipc": "arrow"}

ArrowFormat = Literal["parquet", "ipc", "safetensors"]
FORMATS: tuple[ArrowFormat, ...] = ("parquet", "ipc", "safetensors")
Bfloat16 = Literal["bits", "float32"]
BFLOAT16: tuple[Bfloat16, ...] = ("bits", "float32")
COMPRESSIONS = ("none", "zstd", "lz4")


@dataclass(frozen=True, kw_only=True)
class ArrowParams(StorageParams):
    """The parameters in `--capture-consumers arrow:...`."""

    kind: ClassVar[str] = "arrow"

    format: ArrowFormat = "parquet"
    """`parquet` or `ipc`: rows of many requests in one table per file.
    `safetensors`: one file per request."""
    compression: str = "none"
    """Compression of tables: `none`, `zstd` or `lz4`; ignored for `safetensors`."""
    bfloat16: Bfloat16 = "bits"
    """How tables store bfloat16, which Arrow lacks: `bits`, one binary value per row,
    or `float32`, a list of twice the size."""

    @classmethod
    def _check(cls, options: Options) -> None:
        options.choice("format", FORMATS)
        options.choice("compression", COMPRESSIONS)
        options.choice("bfloat16", BFLOAT16)


class TableShard(Shard):
    """An open table in a shared folder."""

    def __init__(
        self,
        params: ArrowParams,
        workspace: Workspace,
        tag: str,
        sidecar: dict[str, Any],
        columns: tuple[Column, ...],
    ) -> None:
        """Open a temporary file.

        Args:
            params: of the consumer.
            workspace: the consumer's root.
            tag: of the requests.
            sidecar: of a key, with captured rows if there are any.
            columns: of readouts.

        Raises:
            OSError: it cannot be written.

        """
        super().__init__()
        self._params = params
        self._columns = columns
        widens, has_rows = params.bfloat16 == "float32", "readout" not in sidecar
        self._schema = schema_of(sidecar, widens, columns, has_rows)
        name = f"rows-pp{sidecar['pipeline_parallel_rank']:02d}"
        ending = _ENDINGS[params.format]
        # Random, because independent engines may share a directory.
        self._final = str(workspace.folder(tag) / f"{name}-{uuid4().hex}.{ending}")
        self._path, fd = workspace.create()
        os.close(fd)
        self._file = pa.OSFile(self._path, "wb")  # Writes without the GIL.
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
                column_encoding=self._encodings(),
            )
        codec = None if compression == "none" else compression
        options = pa.ipc.IpcWriteOptions(compression=codec)
        return pa.ipc.new_file(self._file, self._schema, options=options)

    def _encodings(self) -> dict[str, str] | None:
        """The encoding of the column of values, by its Parquet path."""
        if "values" not in self._schema.names:
            return None
        is_list = pa.types.is_fixed_size_list(self._schema.field("values").type)
        return {"values.list.element" if is_list else "values": "PLAIN"}

    def append(
        self, request: StoredRequest, name: str, finalizes: list[CaptureFinalize]
    ) -> None:
        """Write the keys of a request; on failure the whole table is lost.

        The caller holds the lock.
        """
        with self._abandoned_on_failure():
            self._append_keys(request, name, finalizes)
            request.commit()
        self.num_bytes = self._file.tell()
        self.wait_for_seal(request, results_of(finalizes, [self._final]))

    def _append_keys(
        self, request: StoredRequest, name: str, finalizes: list[CaptureFinalize]
    ) -> None:
        """Write the keys, those of rows and those of readouts."""
        results = [one for one in finalizes if is_readout(one)]
        values = values_by_tap(request, results)
        rows = {one.key[1:]: one for one in finalizes if not is_readout(one)}
        for tap, finalize in rows.items():
            self._append_key(request, name, finalize, values.get(tap, {}))
        tokens = tokens_of(results)
        for tap, own in sorted(values.items()):
            self._append_results((name, *tap), rows.get(tap), own, tokens)

    def _append_key(
        self,
        request: StoredRequest,
        name: str,
        finalize: CaptureFinalize,
        values: Mapping[str, Values],
    ) -> None:
        """Write the rows of a key, with the results of readouts at their positions."""
        done, sidecar = 0, finalize.sidecar
        for rows in in_batches(request.blocks(finalize, BATCH_BYTES), BATCH_BYTES):
            part = slice(done, done + len(rows))
            batch = batch_of(
                (name, sidecar["layer"], sidecar["hook"]),
                sidecar["positions"][part],
                sidecar["token_ids"][part],
                rows,
                self._schema,
                self._columns,
                values,
            )
            self._write(batch)
            done += len(rows)

    def _append_results(
        self,
        place: tuple[str, int, str],
        rows: CaptureFinalize | None,
        values: Mapping[str, Values],
        tokens: Mapping[int, int | None],
    ) -> None:
        """Write the results at a tap's positions without a captured row."""
        written = set() if rows is None else set(rows.sidecar["positions"])
        found = {position for one in values.values() for position in one.rows}
        if left := sorted(found - written):
            ids = [tokens[position] for position in left]
            self._write(
                batch_of(place, left, ids, None, self._schema, self._columns, values)
            )

    def _write(self, batch: pa.RecordBatch) -> None:
        if self._params.format == "parquet":
            self._writer.write_batch(batch, row_group_size=batch.num_rows)
        else:
            self._writer.write_batch(batch)

    @contextlib.contextmanager
    def _abandoned_on_failure(self) -> Iterator[None]:
        """Drop the file and fail all its requests if the block raises."""
        try:
            yield
        except BaseException:
            self.sealed = True
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
                sync(self._path)
            publish(self._path, self._final, replace=False, fsync=self._params.fsync)
        except BaseException:
            self._drop()
            raise


class ArrowConsumer(FilesConsumer):
    """Writes tables with a row per position, or one safetensors file per request.

    The columns are request id, layer, hook, position, token id and values; see
    `schema_of`. In tables, results of readouts have columns of their own. A
    `CaptureSink`. The result's payload is the list of paths of the files, which are
    complete when the result is returned.
    """

    params_class = ArrowParams
    _params: ArrowParams

    def _check(
        self, raw: dict[str, Any], spec: CaptureSpec, ctx: CaptureContext, where: str
    ) -> None:
        """Refuse what the files have no columns for."""
        _check_widths(spec, ctx, f"{where}.hooks")
        given = raw.get("readouts")
        if given is not None and self._params.format == "safetensors":
            raise fail(
                f"{where}.readouts: results of readouts are columns of tables, and "
                "this consumer has format=safetensors; use one with format=parquet or "
                "ipc, or leave them out",
                f"{where}.readouts",
                given,
            )

    def claimed_places(self, raw: Any, request_id: str, num_samples: int) -> list[str]:
        """The paths of files with this request only; tables hold several requests."""
        if self._params.format != "safetensors":
            return []
        return places_of(raw, request_id, num_samples, self._params.default_tag)

    def publish(self, request: StoredRequest, finalizes: list[CaptureFinalize]) -> None:
        """Append the rows of a request to a table, or write a file for it."""
        sidecar = finalizes[0].sidecar
        tag, name = place_of(sidecar, self._params.default_tag)
        if self._params.format == "safetensors":
            request.settle(
                write_safetensors(
                    request, finalizes, self._workspace, (tag, name), self._params.fsync
                )
            )
            return
        rows = [one.sidecar for one in finalizes if not is_readout(one)]
        described, columns = rows[0] if rows else sidecar, columns_of(finalizes)
        self._shards.add(
            # One open table per thread, so that threads need not wait for each other.
            [
                (
                    tag,
                    number,
                    bool(rows),
                    columns,
                    described["hidden_size"],
                    tuple(described.get("heads", ())),
                )
                for number in range(self._params.num_threads)
            ],
            lambda _: TableShard(
                self._params, self._workspace, tag, described, columns
            ),
            lambda shard: shard.append(request, name, finalizes),
        )


def _check_widths(spec: CaptureSpec, ctx: CaptureContext, where: str) -> None:
    """Refuse hook points of several widths: a file's rows are all equally wide."""
    widths: dict[int, str] = {}
    for hook, layers in spec.hooks.items():
        for layer in layers:
            tap = layer, str(hook)
            width = width_at(ctx.point_shapes, ctx.hidden_size, tap, spec.heads)
            widths.setdefault(width, f"{hook} of {layer}")
    if len(widths) > 1:
        said = ", ".join(f"{name} has {width}" for width, name in widths.items())
        raise fail(
            f"{where}: the rows of a request must be equally wide here, because one "
            f"file has them all; {said} numbers. Capture them by requests of their "
            "own, or by the consumer filesystem",
            where,
            [str(hook) for hook in spec.hooks],
        )
