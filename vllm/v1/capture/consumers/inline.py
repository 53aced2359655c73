# SPDX-License-Identifier: Apache-2.0
"""The consumer `inline`, which returns rows with the request's output."""

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from vllm.v1.capture.consumer import CaptureConsumer
from vllm.v1.capture.consumers.storage.options import Options
from vllm.v1.capture.errors import fail
from vllm.v1.capture.memory.budget import BUDGET
from vllm.v1.capture.results import GroupedRows, RowsByTap
from vllm.v1.capture.selectors import parse_spec
from vllm.v1.capture.types import CaptureContext, CaptureKey, CaptureSpec
from vllm.v1.residual.plain_data import plain
from vllm.v1.residual.selectors import resolve_positions
from vllm.v1.residual.spans import OPEN_END, Spans
from vllm.v1.residual.tap import width_at

if TYPE_CHECKING:
    from vllm.config import VllmConfig

TRANSPORTS = ("http", "shm")


class InlineConsumer(CaptureConsumer):
    """Returns each key's rows as the payload, a `RowsByTap`.

    A request's spec is `{"hooks": ..., "positions": ..., "readouts": ...}` with an
    optional key that only concerns HTTP responses: with `"transport": "shm"` the
    response refers to shared memory, which a client on the same host maps.
    """

    location: Literal["worker", "driver"] = "worker"
    reads_client_spec: ClassVar[bool] = True
    remembers_specs: ClassVar[bool] = False
    takes_readouts: ClassVar[bool] = True
    waits: ClassVar[bool] = True
    streams: ClassVar[bool] = True

    def __init__(
        self, vllm_config: "VllmConfig | None", params: dict[str, Any]
    ) -> None:
        self.check_params(params)
        host_bytes = BUDGET.limit
        if vllm_config is not None:
            host_bytes = vllm_config.capture_config.host_memory_bytes
        most: int = params.get("max_inflight_bytes", host_bytes)
        self.max_inflight_bytes = most
        """Maximum bytes of rows of all requests in flight; checked by the front end."""
        self._max_request_bytes: int = params.get(
            "max_request_bytes", max(most // 2, 1)
        )
        """Maximum bytes of rows per request."""

    @classmethod
    def check_params(cls, params: dict[str, Any]) -> None:
        """As of `CaptureConsumer`."""
        names = ["max_request_bytes", "max_inflight_bytes"]
        options = Options("capture_consumers.inline", params, names)
        for name in names:
            options.whole(name)

    def validate_client_spec(self, raw: Any, ctx: CaptureContext) -> CaptureSpec:
        """Check the spec, and that its rows fit the limit per request.

        Raises:
            CaptureValidationError: the spec is invalid, or its rows may be too large.

        """
        where = f"capture.{self.instance_name or 'inline'}"
        raw = plain(raw)
        spec = parse_spec(raw, ctx, where, ("transport", "readouts"))
        if (chosen := raw.get("transport", "http")) not in TRANSPORTS:
            raise fail(
                f"{where}.transport must be one of {list(TRANSPORTS)}",
                f"{where}.transport",
                chosen,
            )
        self._check_size(spec, ctx, where)
        return spec

    def _check_size(self, spec: CaptureSpec, ctx: CaptureContext, where: str) -> None:
        size, what = most_bytes(spec, ctx, where)
        if size > self._max_request_bytes:
            raise fail(
                f"{where}: {what}, may take {size} bytes; at most "
                f"{self._max_request_bytes} are allowed (max_request_bytes). "
                "Capture fewer layers or positions, lower max_tokens, use a consumer "
                "that writes to files, or start with --capture-consumers "
                f"{self.instance_name or 'inline'}:max_request_bytes={size} and, if "
                "necessary, a larger --capture-host-memory-bytes",
                where,
                size,
            )

    def on_capture(
        self, key: CaptureKey, tensor: torch.Tensor, sidecar: dict[str, Any]
    ) -> RowsByTap:
        """The rows as a payload of one tap."""
        return self.on_group([key[1:]], tensor.unsqueeze(0), sidecar).by_tap()

    on_group = staticmethod(GroupedRows.of)
    """The rows `[taps, rows, hidden_size]` of a group of taps as a payload."""


def most_bytes(spec: CaptureSpec, ctx: CaptureContext, where: str) -> tuple[int, str]:
    """The maximum size of a request's rows in bytes, and how it is made up, as text."""
    rows = count_rows(resolve_positions(spec.positions, ctx, where, fail), ctx, where)
    taps = [(n, str(hook)) for hook, layers in spec.hooks.items() for n in layers]
    shapes, heads = ctx.point_shapes, spec.heads
    width = sum(width_at(shapes, ctx.hidden_size, tap, heads) for tap in taps)
    each = width * ctx.element_size_bytes
    what = (
        f"{rows} positions at {len(taps)} hook points with {each} bytes together, for "
        f"{ctx.num_samples} samples"
    )
    return rows * each * ctx.num_samples, what


def count_rows(ranges: Spans, ctx: CaptureContext, where: str) -> int:
    """The maximum number of rows that a request can have in `ranges`.

    Raises:
        CaptureValidationError: it has no bound, because `max_tokens` is not set.

    """
    generated = 0 if ctx.max_tokens is None else ctx.max_tokens
    end = ctx.num_prompt_tokens + max(generated - 1, 0)
    if ctx.max_tokens is None and any(stop >= OPEN_END for _, stop in ranges):
        raise fail(
            f"{where}: without max_tokens the number of rows has no bound; set it",
            "max_tokens",
            None,
        )
    return sum(max(min(stop, end) - start, 0) for start, stop in ranges)
