# SPDX-License-Identifier: Apache-2.0
"""The consumer for `output_residual_stream`: rows after their layer's steering."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from vllm.v1.capture.consumers.inline import InlineConsumer
from vllm.v1.capture.results import GroupedRows
from vllm.v1.capture.selectors import parse_spec
from vllm.v1.capture.types import CaptureContext, CaptureSpec
from vllm.v1.residual.plain_data import plain
from vllm.v1.residual.tap import Tap


class LensConsumer(InlineConsumer):
    """The `inline` consumer, with the last layer's rows steered.

    The stream after the last layer is captured before that layer's steering, and no
    later hook point exists. Global vectors at the last layer are not included in these
    rows.
    """

    streams: ClassVar[bool] = False

    def validate_client_spec(self, raw: Any, ctx: CaptureContext) -> CaptureSpec:
        """Check the spec that `translate` created, and that its rows fit the limit."""
        where = f"capture.{self.instance_name or 'vllm_lens'}"
        spec = parse_spec(plain(raw), ctx, where, ("steered",))
        self._check_size(spec, ctx, where)
        return spec

    def on_group(
        self, taps: Sequence[Tap], rows: torch.Tensor, sidecar: dict[str, Any]
    ) -> GroupedRows:
        """The rows, with the steering applied to those of the last layer."""
        entries = (sidecar.get("client_spec") or {}).get("steered")
        if entries and any(hook == "post_block" for _, hook in taps):
            rows = rows.clone()  # Other consumers may have the same rows.
            for number, (_, hook) in enumerate(taps):
                if hook == "post_block":
                    rows[number] = steered(rows[number], sidecar["positions"], entries)
        return super().on_group(taps, rows, sidecar)


def steered(
    rows: torch.Tensor, positions: list[int], entries: list[dict[str, Any]]
) -> torch.Tensor:
    """Add steering to rows `[n, H]` at `positions`, computed in float32.

    Each entry has `scale`, `norm_match`, and `vector` `[H]` or `vectors` `[p, H]` with
    `positions` `[p]`; norms are those before any addition.
    """
    stream = rows.float()
    norms = stream.norm(dim=-1, keepdim=True)
    result = stream.clone()
    for entry in entries:
        if "vector" in entry:
            added = torch.tensor(entry["vector"]).expand_as(stream)
        else:
            place = {p: row for p, row in zip(entry["positions"], entry["vectors"])}
            zero = [0.0] * stream.shape[-1]
            added = torch.tensor([place.get(p, zero) for p in positions])
        if entry["norm_match"]:
            length = added.norm(dim=-1, keepdim=True)
            added = torch.where(length > 0, norms * added / length, 0.0)
        result += entry["scale"] * added
    return result.to(rows.dtype)
