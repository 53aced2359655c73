# SPDX-License-Identifier: Apache-2.0
"""Two families of CUDA graphs: plain ones, and ones whose taps launch.

A tap that has nothing to capture still costs a launch. Steps without captured rows
therefore run *plain* graphs, recorded with taps that launch nothing, so that they
hold the same kernels as upstream's; steps with captured rows run their *tapped*
twins. Steering needs no family: its additions are always in the graph.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.config.compilation import CUDAGraphMode
from vllm.model_executor.layers.residual_ops import Launch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

Descriptors = dict[CUDAGraphMode, list["BatchExecutionDescriptor"]]


def with_families(descriptors: Descriptors, vllm_config: "VllmConfig") -> Descriptors:
    """The graphs to record: each one twice where capture is configured."""
    if not vllm_config.capture_config.enabled:
        return descriptors
    return {
        mode: [
            family
            for descriptor in of_mode
            for family in (descriptor, replace(descriptor, tapped=True))
        ]
        for mode, of_mode in descriptors.items()
    }


def record_family(tapped: bool) -> None:
    """Say which family the graph that is recorded next belongs to."""
    Launch.capture = tapped


def family_of(
    descriptor: "BatchExecutionDescriptor", tapped: bool
) -> "BatchExecutionDescriptor":
    """The descriptor of the graph that a step runs."""
    if not tapped or descriptor.cg_mode == CUDAGraphMode.NONE:
        return descriptor
    return replace(descriptor, tapped=True)
