# SPDX-License-Identifier: Apache-2.0
"""The program kernel compiles for a GPU, which needs none."""

from pathlib import Path
from types import ModuleType

import pytest

from tests.support.compiled import for_hopper, needs_compiler, on_a_gpu, resources
from vllm.model_executor.layers.residual import program_kernel

pytestmark = needs_compiler

STACK = 176
"""Most bytes of a thread's registers that are kept in memory.

24 without the loop over the rivals of a top-k SAE. With it a step of an 8B model on an
H100 in which a direction is projected out at all 32 layers still takes what upstream's
takes (0.998 of its speed).
"""
POINTERS = {
    "index_ptr": "*i64",
    "rows_ptr": "*i32",
    "gates_ptr": "*fp32",
}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return on_a_gpu(monkeypatch, program_kernel)


@pytest.mark.parametrize(
    ("width", "dtype", "pair"),
    [(2048, "bf16", True), (4096, "fp16", False), (8192, "bf16", True)],
)
def test_it_compiles_for_hopper(
    kernels: ModuleType, tmp_path: Path, width: int, dtype: str, pair: bool
) -> None:
    constants = {
        "HAS_RESIDUAL": pair,
        "LEADS": True,
        "ALIGNED": True,
        "BLOCK": width,
        "launch_pdl": pair,
    }
    streams = dict.fromkeys(("source_ptr", "hidden_ptr", "residual_ptr"), f"*{dtype}")
    most = kernels.registers(width)
    made = for_hopper(
        kernels._intervene_kernel,
        {**streams, **POINTERS},
        constants,
        num_warps=8,
        launch_pdl=pair,
        maxnreg=most,
    )
    used, stack = resources(tmp_path, made)
    assert used <= most
    assert stack <= STACK
    waits = "griddepcontrol.wait" in made.asm["ptx"]
    assert waits == pair, "it begins early if and only if it is asked to"
