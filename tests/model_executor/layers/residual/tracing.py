# SPDX-License-Identifier: Apache-2.0
"""Traces models with Dynamo, with early additions, also compiled."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor.compile_fx import compile_fx

from vllm.model_executor.layers.residual.overlap_pass import begin_additions_early


def traced(
    model: Callable[..., Any], change: Callable[[fx.Graph], Any], compiled: bool = False
) -> Callable[..., Any]:
    """Trace the model with Dynamo, and apply `change` to its graph.

    With `compiled`, Inductor compiles the result.
    """

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        change(module.graph)
        module.graph.lint()
        module.recompile()
        made: Callable[..., Any] = module.forward
        if compiled:
            made = compile_fx(module, inputs)
        return made

    torch._dynamo.reset()
    return torch.compile(model, backend=backend, fullgraph=True, dynamic=False)


def treated(graph: fx.Graph) -> int:
    """Let additions start early as on a GPU; returns the number of residuals."""
    return begin_additions_early(graph, "cpu")
