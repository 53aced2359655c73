# SPDX-License-Identifier: Apache-2.0
"""Some heads of the rows of a hook point: which ones, and their part of a row."""

from collections.abc import Sequence
from typing import Any

import torch

from vllm.v1.residual.bounds import shown
from vllm.v1.residual.numbers import Fail, is_integer
from vllm.v1.residual.selectors import as_list
from vllm.v1.residual.tap import PointShape, Tap


def parse_heads(
    raw: Any, tap: Tap, shape: PointShape, at: str, fail: Fail
) -> tuple[int, ...]:
    """The heads that a key `heads` lists, in its order.

    Args:
        raw: what the user wrote.
        tap: whose rows are meant.
        shape: of these rows.
        at: the key's name in messages.
        fail: creates the exception to raise.

    """
    heads = as_list(raw)
    if not shape.heads:
        raise fail(
            f"{at}: the rows of {tap[1]} do not consist of heads; those of q, k, v and "
            "z do, and those of streams_pre and streams_post of streams",
            at,
            shown(heads),
        )
    is_list = isinstance(heads, (list, tuple)) and bool(heads)
    if not is_list or not all(is_integer(one, 0, shape.heads) for one in heads):
        raise fail(
            f"{at}: {shown(heads)} must list heads; {tap[1]} of layer {tap[0]} has the "
            f"heads 0 to {shape.heads - 1}",
            at,
            heads,
        )
    if len(set(heads)) < len(heads):
        raise fail(f"{at}: a head is listed twice", at, heads)
    return tuple(map(int, heads))


def rows_of_heads(
    rows: torch.Tensor, heads: Sequence[int], head_size: int
) -> torch.Tensor:
    """The part of rows `[..., width]` that is of these heads, in order; a copy."""
    return torch.cat(
        [rows[..., one * head_size : (one + 1) * head_size] for one in heads], dim=-1
    )
