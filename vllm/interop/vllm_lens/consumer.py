# SPDX-License-Identifier: Apache-2.0
"""The consumer behind `output_residual_stream`: rows after their layer's steering."""

from typing import Any, ClassVar

import torch

from vllm.v1.capture.consumers.inline import InlineConsumer
from vllm.v1.capture.payload import RowsByTap
from vllm.v1.capture.selectors import parse_spec, plain
from vllm.v1.capture.types import CaptureContext, CaptureKey, CaptureSpec


class LensConsumer(InlineConsumer):
    """`inline`, with the last layer's rows steered as the request steers them.

    The stream that leaves the last layer is captured before that layer's steering, and
    no later hook point exists. Vectors that the server adds for everybody at the last
    layer are not in these rows.
    """

    streams: ClassVar[bool] = False

    def validate_client_spec(self, raw: Any, ctx: CaptureContext) -> CaptureSpec:
        """Check the spec that `translate` made, and that its rows fit the limit."""
        where = f"capture.{self.instance_name or 'vllm_lens'}"
        spec = parse_spec(plain(raw), ctx, where, ("steered",))
        self._check_size(spec, ctx, where)
        return spec

    def on_capture(
        self, key: CaptureKey, tensor: torch.Tensor, sidecar: dict[str, Any]
    ) -> RowsByTap:
        """The rows; those of the last layer with its steering."""
        entries = (sidecar.get("client_spec") or {}).get("steered")
        if entries and key[2] == "post_block":
            tensor = steered(tensor, sidecar["positions"], entries)
        return super().on_capture(key, tensor, sidecar)


def steered(
    rows: torch.Tensor, positions: list[int], entries: list[dict[str, Any]]
) -> torch.Tensor:
    """Rows `[n, H]` at `positions` with additions, computed in float32.

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
