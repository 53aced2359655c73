# SPDX-License-Identifier: Apache-2.0
"""Guards hook-point ops in Inductor's generated code, and the copies that they need.

A step that is too large for any CUDA graph runs Inductor's Python wrapper, one line
per op, and every op then checks whether it has work to do. That took 7.5 µs per call
on the host of an H200, or 2.4 ms in an idle step of 32 layers. Conditions are therefore
written into the generated line, before the call: first one that all ops share, then
whether this one launches, because a step that needs one op would call all others. On a
CPU, where nothing is recorded, the line calls the op's function without PyTorch's
dispatcher, which takes longer than a token's program.

The line is written by a function registered for the op in a table of Inductor's, see
`torch/_inductor/codegen/custom_extern_kernel_codegen.py`.

A hook-point op writes to a copy of a tensor if other code may read the original. If
nothing else reads it, Inductor removes the copy, as intended. But PyTorch 2.13 also
does so if the original is a view, such as `pair[1]` or a half of `chunk`: the op's
argument is then assumed to start where the view's base starts, and the op reads another
row. The decision is made by `torch._inductor.fx_passes.post_grad.same_meta`, which
compares sizes and strides but not storage offsets.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from vllm.model_executor.layers.residual.capture_op import Launch, capture_rows
from vllm.model_executor.layers.residual.program_op import intervene_wanted
from vllm.model_executor.layers.residual.steer_op import steer_rows
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from torch._inductor import ir
    from torch.fx import Node


def guard_copies() -> None:
    """Make Inductor keep copies whose storage offset differs, from now on."""
    from torch._inductor.fx_passes import post_grad

    same_meta = post_grad.same_meta
    if getattr(same_meta, "guarded", False):
        return

    def guarded(one: "Node", other: "Node") -> bool:
        return bool(same_meta(one, other)) and _starts(one) == _starts(other)

    guarded.guarded = True  # type: ignore[attr-defined]
    post_grad.same_meta = guarded  # type: ignore[assignment]


def _starts(node: "Node") -> str:
    """A tensor's storage offset, as text because it may be symbolic."""
    return str(node.meta["val"].storage_offset())


ANY, WHOLE = f"{Launch.__name__}.taps", f"{Launch.__name__}.whole"
THIRD = f"{ANY} and {Launch.__name__}.wants({{2}})"
SECOND = f"{ANY} and {Launch.__name__}.wants({{1}})"
CONDITIONS = {
    "capture_rows": THIRD,
    "steer_rows": SECOND,
    "steer_rows_ahead": WHOLE,
    "intervene_rows": THIRD,
}
"""By op: an expression that is true whenever the op may have work to do. A number in
braces stands for the argument at this position."""
FUNCTIONS: dict[str, Callable[..., None]] = {
    "capture_rows": capture_rows,
    "steer_rows": steer_rows,
    "intervene_rows": intervene_wanted,
}
"""By op: its function, of those that run on a CPU, called where the condition holds."""
IMPORT = f"from {Launch.__module__} import {Launch.__name__}"


def guard_calls() -> None:
    """Register the guarded form of each op with Inductor for later compilations."""
    from torch._inductor.codegen.custom_extern_kernel_codegen import (
        CUSTOM_EXTERN_KERNEL_CODEGEN,
        CustomCodegen,
    )

    for name, condition in CONDITIONS.items():
        function = FUNCTIONS.get(name) if current_platform.is_cpu() else None
        write = CustomCodegen(python=partial(_write_call, condition, function))
        CUSTOM_EXTERN_KERNEL_CODEGEN[f"torch.ops.vllm.{name}.default"] = write


def _write_call(
    condition: str,
    function: Callable[..., None] | None,
    node: "ir.FallbackKernel",
    writeline: Callable[[str], None],
) -> None:
    """Write the line that calls an op, or `function` in its place."""
    from torch._inductor.virtualized import V

    writer = V.graph.wrapper_code
    while parent := getattr(writer, "parent_wrapper", None):
        writer = parent  # A subgraph's own writer emits no imports.
    writer.add_import_once(IMPORT)
    arguments = [*node.codegen_args(), *node.codegen_kwargs()]
    asked, called = condition.format(*arguments), node.get_kernel_name()
    if function is not None:
        called = function.__name__
        writer.add_import_once(f"from {function.__module__} import {called}")
    writeline(f"{asked} and {called}({', '.join(arguments)})")
