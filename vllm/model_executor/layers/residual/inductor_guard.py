# SPDX-License-Identifier: Apache-2.0
"""Compiled code that calls an op of a hook point only in passes that may want it.

A step that is too large for any graph runs what Inductor wrote: a line of Python for
each op, which looks whether it has anything to do. That took 7.5 µs a call on the host
of an H200, 2.4 ms in a step of 32 layers with nothing to do. So the condition that all
of them have in common stands in the line itself, in front of the call.

The lines are written by a function that Inductor's table of such functions has for the
op, see `torch/_inductor/codegen/custom_extern_kernel_codegen.py`.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.model_executor.layers.residual.capture_op import Launch

if TYPE_CHECKING:
    from torch._inductor import ir

logger = init_logger(__name__)

ANY, WHOLE = f"{Launch.__name__}.taps", f"{Launch.__name__}.whole"
CONDITIONS = {
    "capture_rows": ANY,
    "capture_split_rows": ANY,
    "steer_rows": ANY,
    "steer_split_rows": ANY,
    "steer_rows_ahead": WHOLE,
    "intervene_rows": ANY,
    "intervene_split_rows": ANY,
}
"""What must hold where an op does anything, by the op."""
IMPORT = f"from {Launch.__module__} import {Launch.__name__}"


def ask_before_calls() -> None:
    """Have Inductor write the conditions, from now on."""
    try:
        from torch._inductor.codegen.custom_extern_kernel_codegen import (
            CUSTOM_EXTERN_KERNEL_CODEGEN,
            CustomCodegen,
        )
    except ImportError:  # Of another PyTorch than upstream pins for this platform.
        logger.debug("Compiled code calls ops of hook points that have nothing to do")
        return
    for name, condition in CONDITIONS.items():
        write = CustomCodegen(python=partial(_write_call, condition))
        CUSTOM_EXTERN_KERNEL_CODEGEN[f"torch.ops.vllm.{name}.default"] = write


def _write_call(
    condition: str, node: "ir.FallbackKernel", writeline: Callable[[str], None]
) -> None:
    from torch._inductor.virtualized import V

    writer = V.graph.wrapper_code
    while parent := getattr(writer, "parent_wrapper", None):
        writer = parent  # A part of a graph has one of its own, without imports.
    writer.add_import_once(IMPORT)
    arguments = ", ".join([*node.codegen_args(), *node.codegen_kwargs()])
    writeline(f"{condition} and {node.get_kernel_name()}({arguments})")
