# SPDX-License-Identifier: Apache-2.0
"""The program kernel compiles for a GPU, which needs none."""

import importlib
import importlib.util
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from vllm.model_executor.layers.residual import program_kernel, program_records

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    find_spec("triton.backends.nvidia") is None,
    reason="this Triton has no compiler for NVIDIA GPUs",
)

STACK = 24
"""Most bytes of a thread's registers that are kept in memory."""
POINTERS = {
    "index_ptr": "*i64",
    "rows_ptr": "*i32",
    "gates_ptr": "*fp32",
    "records_ptr": "*i32",
}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module as it is where Triton has a device: on a CPU it has no kernel."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    utils = importlib.import_module("vllm.triton_utils")
    monkeypatch.setattr(utils, "HAS_TRITON", True)
    monkeypatch.setattr(utils, "triton", triton)
    monkeypatch.setattr(utils, "tl", importlib.import_module("triton.language"))
    monkeypatch.setitem(sys.modules, program_records.__name__, loaded(program_records))
    return loaded(program_kernel)


def loaded(module: ModuleType) -> ModuleType:
    """The module, loaded once more from its file."""
    assert module.__file__ is not None
    spec = importlib.util.spec_from_file_location("on_a_gpu", Path(module.__file__))
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize(
    ("width", "dtype", "pair"),
    [(2048, "bf16", True), (4096, "fp16", False), (8192, "bf16", True)],
)
def test_it_compiles_for_hopper(
    kernels: ModuleType, tmp_path: Path, width: int, dtype: str, pair: bool
) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = kernels._intervene_kernel
    constants = {
        "HAS_RESIDUAL": pair,
        "HAS_RECORDS": pair,
        "LEADS": True,
        "ALIGNED": True,
        "BLOCK": width,
        "launch_pdl": pair,
    }
    streams = dict.fromkeys(("source_ptr", "hidden_ptr", "residual_ptr"), f"*{dtype}")
    types = {**streams, **POINTERS, **dict.fromkeys(constants, "constexpr")}
    places = {name: (number,) for number, name in enumerate(kernel.arg_names)}
    # As Triton specializes the kernel for the addresses and widths of models.
    aligned = [n for n in places if n.endswith(("_ptr", "_stride")) or n == "width"]
    source = ASTSource(
        kernel,
        {name: types.get(name, "i32") for name in kernel.arg_names},
        constexprs={places[name]: value for name, value in constants.items()},
        attrs={places[name]: [["tt.divisibility", 16]] for name in aligned},
    )
    most = kernels.registers(width)
    options = {"num_warps": 8, "launch_pdl": pair, "maxnreg": most}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    used, stack = resources(tmp_path / "kernel.cubin", made.asm["cubin"])
    assert used <= most
    assert stack <= STACK
    waits = "griddepcontrol.wait" in made.asm["ptx"]
    assert waits == pair, "it begins early if and only if it is asked to"


def resources(path: Path, cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread."""
    path.write_bytes(cubin)
    told = subprocess.run(
        [triton.knobs.nvidia.cuobjdump.path, "-res-usage", path],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert found is not None, told
    return int(found[1]), int(found[2])
