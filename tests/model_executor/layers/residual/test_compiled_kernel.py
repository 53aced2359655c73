# SPDX-License-Identifier: Apache-2.0
"""The program kernel compiles for a GPU, which needs none."""

import importlib
import importlib.util
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from vllm.model_executor.layers.residual import program_kernel

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    find_spec("triton.backends.nvidia") is None,
    reason="this Triton has no compiler for NVIDIA GPUs",
)

WIDTH = 2048
POINTERS = {"index_ptr": "*i64", "rows_ptr": "*i32", "gates_ptr": "*fp32"}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module as it is where Triton has a device: on a CPU it has no kernel."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    utils = importlib.import_module("vllm.triton_utils")
    monkeypatch.setattr(utils, "HAS_TRITON", True)
    monkeypatch.setattr(utils, "triton", triton)
    monkeypatch.setattr(utils, "tl", importlib.import_module("triton.language"))
    path = Path(program_kernel.__file__)
    spec = importlib.util.spec_from_file_location("program_kernel_on_a_gpu", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("dtype", "pair"), [("bf16", True), ("fp16", False)])
def test_it_compiles_for_hopper(kernels: ModuleType, dtype: str, pair: bool) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = kernels._intervene_kernel
    constants = {
        "HAS_RESIDUAL": pair,
        "LEADS": True,
        "ALIGNED": True,
        "BLOCK": WIDTH,
        "launch_pdl": pair,
    }
    streams = dict.fromkeys(("source_ptr", "hidden_ptr", "residual_ptr"), f"*{dtype}")
    types = {**streams, **POINTERS, **dict.fromkeys(constants, "constexpr")}
    places = {name: (number,) for number, name in enumerate(kernel.arg_names)}
    source = ASTSource(
        kernel,
        {name: types.get(name, "i32") for name in kernel.arg_names},
        constexprs={places[name]: value for name, value in constants.items()},
    )
    options = {"num_warps": 8, "launch_pdl": pair}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert made.asm["cubin"]
    waits = "griddepcontrol.wait" in made.asm["ptx"]
    assert waits == pair, "it begins early if and only if it is asked to"
