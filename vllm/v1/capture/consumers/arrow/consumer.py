# SPDX-License-Identifier: Apache-2.0
"""`ArrowConsumer`, which writes files that common data tools can open."""

from typing import Any

from vllm.v1.capture.consumers.arrow.readouts import columns_of, is_readout
from vllm.v1.capture.consumers.arrow.safetensors_file import write_safetensors
from vllm.v1.capture.consumers.arrow.shard import ArrowParams, Form, TableShard
from vllm.v1.capture.consumers.storage.consumer import FilesConsumer
from vllm.v1.capture.consumers.storage.files import (
    Workspace,
    place_of,
    places_of,
)
from vllm.v1.capture.consumers.storage.stored_request import StoredRequest
from vllm.v1.capture.errors import fail
from vllm.v1.capture.types import CaptureContext, CaptureFinalize, CaptureSpec
from vllm.v1.residual.point_shapes import width_at


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

    def publish(
        self,
        request: StoredRequest,
        finalizes: list[CaptureFinalize],
        workspace: Workspace,
    ) -> None:
        """Append the rows of a request to a table, or write a file for it."""
        sidecar = finalizes[0].sidecar
        tag, name = place_of(sidecar, self._params.default_tag)
        if self._params.format == "safetensors":
            request.settle(
                write_safetensors(
                    request, finalizes, workspace, (tag, name), self._params.fsync
                )
            )
            return
        rows = [one.sidecar for one in finalizes if not is_readout(one)]
        form = Form(bool(rows), columns_of(finalizes))
        described = rows[0] if rows else sidecar
        self._shards.add(
            # One open table per thread, so that threads need not wait for each other.
            [
                (
                    tag,
                    number,
                    form,
                    described["hidden_size"],
                    tuple(described.get("heads", ())),
                )
                for number in range(self._params.num_threads)
            ],
            lambda _: TableShard(self._params, workspace, tag, described, form),
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
