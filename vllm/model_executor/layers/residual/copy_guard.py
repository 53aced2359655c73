# SPDX-License-Identifier: Apache-2.0
"""Prevents Inductor from removing copies of views that are needed.

A hook-point op writes to a copy of a tensor if other code may read the original. If
nothing else reads it, Inductor removes the copy, as intended. But PyTorch 2.13 also
does so if the original is a view, such as `pair[1]` or a half of `chunk`: the op's
argument is then assumed to start where the view's base starts, and the op reads another
row. The decision is made by `torch._inductor.fx_passes.post_grad.same_meta`, which
compares sizes and strides but not storage offsets.
"""

from typing import TYPE_CHECKING

from vllm.logger import init_logger

if TYPE_CHECKING:
    from torch.fx import Node

logger = init_logger(__name__)


def guard_copies() -> None:
    """Make Inductor keep copies whose storage offset differs, from now on."""
    try:
        from torch._inductor.fx_passes import post_grad

        same_meta = post_grad.same_meta
    except (ImportError, AttributeError):  # Not the PyTorch that upstream pins.
        logger.debug("Inductor's pass that removes copies was not found")
        return
    if getattr(same_meta, "guarded", False):
        return

    def guarded(one: "Node", other: "Node") -> bool:
        return bool(same_meta(one, other)) and _starts(one) == _starts(other)

    guarded.guarded = True  # type: ignore[attr-defined]
    post_grad.same_meta = guarded  # type: ignore[assignment]


def _starts(node: "Node") -> str:
    """A tensor's storage offset, as text because it may be symbolic."""
    return str(node.meta["val"].storage_offset())
