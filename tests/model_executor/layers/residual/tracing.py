# SPDX-License-Identifier: Apache-2.0
"""Models as Dynamo traces them, with additions that begin early, also compiled."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor.compile_fx import compile_fx

from vllm.model_executor.layers.residual.overlap_pass import begin_additions_early


def traced(
    model: Callable[..., Any], change: Callable[[fx.Graph], Any], compiled: bool = False
) -> Callable[..., Any]:
    """The model as Dynamo traces it, once `change` has had its graph.

    `compiled`: Inductor makes code of that.
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
    """Additions begin early as on a GPU; for how many residuals."""
    return begin_additions_early(graph, "cpu")
