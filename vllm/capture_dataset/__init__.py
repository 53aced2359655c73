# SPDX-License-Identifier: Apache-2.0
"""Data sets of captured rows: collected by `vllm capture`, opened by `load_dataset`.

Names are imported when they are used: `vllm capture` checks its options without torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.capture_dataset.dataset import CaptureDataset, load_dataset
    from vllm.capture_dataset.view import LayerView

__all__ = ["CaptureDataset", "LayerView", "load_dataset"]


def __getattr__(name: str) -> Any:
    if name == "LayerView":
        from vllm.capture_dataset import view as module
    elif name in __all__:
        from vllm.capture_dataset import dataset as module  # type: ignore[no-redef]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(module, name)
