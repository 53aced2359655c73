# SPDX-License-Identifier: Apache-2.0
"""Copies of views that Inductor must not take for nothing.

An op of a hook point writes to a copy of a tensor where others may read the original.
Where nothing else reads it, Inductor leaves the copy out, which is what we want. But
PyTorch 2.13 does so where the original is a view, too, as `pair[1]` or a half of
`chunk`: the op's argument is then taken to begin where the view's base begins, and the
op reads another row. `torch._inductor.fx_passes.post_grad.same_meta` decides; it
compares sizes and strides but not where in its storage a tensor begins.
"""

from typing import TYPE_CHECKING

from vllm.logger import init_logger

if TYPE_CHECKING:
    from torch.fx import Node

logger = init_logger(__name__)


def guard_copies() -> None:
    """Have Inductor keep a copy that begins elsewhere in its storage, from now on."""
    try:
        from torch._inductor.fx_passes import post_grad

        same_meta = post_grad.same_meta
    except (ImportError, AttributeError):  # Another PyTorch than upstream pins.
        logger.debug("Inductor's pass that leaves copies out is not known")
        return
    if getattr(same_meta, "guarded", False):
        return

    def guarded(one: "Node", other: "Node") -> bool:
        return bool(same_meta(one, other)) and _starts(one) == _starts(other)

    guarded.guarded = True  # type: ignore[attr-defined]
    post_grad.same_meta = guarded  # type: ignore[assignment]


def _starts(node: "Node") -> str:
    """Where a tensor begins; as text, as it may depend on a size that is not known."""
    return str(node.meta["val"].storage_offset())
