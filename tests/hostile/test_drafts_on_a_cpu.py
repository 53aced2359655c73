# SPDX-License-Identifier: Apache-2.0
"""What upstream leaves open: settings of draft tokens on a CPU.

If this fails, upstream has mended it: remove the line of `docs/operate/security.md`.
"""

import torch

from vllm.platforms import current_platform
from vllm.utils.cpu_triton_utils import _expand_kernel_impl


def test_temperatures_of_draft_tokens_stay_undefined() -> None:
    current_platform.import_kernels()
    expanded = torch.full((3,), -1.0)
    _expand_kernel_impl(expanded, torch.tensor([0.0, 0.7]), torch.tensor([1, 3]), 0, 1)
    assert (expanded == -1.0).all()
