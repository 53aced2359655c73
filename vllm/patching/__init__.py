# SPDX-License-Identifier: Apache-2.0
"""Activation patching: grids over layers, heads and positions, in one call.

`docs/steering/patching.md` shows how they are used.
"""

from vllm.patching.grid import Span
from vllm.patching.result import PatchResult
from vllm.patching.sweeps import ablation_sweep, causal_trace, patch_sweep

__all__ = ["PatchResult", "Span", "ablation_sweep", "causal_trace", "patch_sweep"]
