# SPDX-License-Identifier: Apache-2.0
"""Families of CUDA graphs that differ in which taps launch.

A tap that has nothing to capture still costs a launch. Steps without captured rows
therefore run *plain* graphs, recorded with taps that launch nothing, so that they
hold the same kernels as upstream's. Steps with captured rows run the smallest
family that has the taps they need. Steering needs no family: its additions are
always in the graph.
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
    """The graphs to record: each one once per family, where capture is configured.

    Piecewise graphs serve steps with prompts, whose kernels are long beside a tap's:
    they come plain and with all taps only, which keeps the start short.
    """
    if not vllm_config.capture_config.enabled:
        return descriptors
    last = len(Launch.families) - 1
    return {
        mode: [
            replace(descriptor, tapped=family)
            for descriptor in of_mode
            for family in (range(last + 1) if mode == CUDAGraphMode.FULL else (0, last))
        ]
        for mode, of_mode in descriptors.items()
    }


def record_family(family: int) -> None:
    """Say which family the graph that is recorded next belongs to."""
    Launch.taps = Launch.families[family]


def family_of(
    descriptor: "BatchExecutionDescriptor", family: int
) -> "BatchExecutionDescriptor":
    """The descriptor of the graph that a step runs."""
    if family == 0 or descriptor.cg_mode == CUDAGraphMode.NONE:
        return descriptor
    if descriptor.cg_mode != CUDAGraphMode.FULL:
        family = len(Launch.families) - 1
    return replace(descriptor, tapped=family)
