# SPDX-License-Identifier: Apache-2.0
"""Compiles kernels for a GPU, which needs none."""

import importlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

needs_compiler = pytest.mark.skipif(
    find_spec("triton") is None or find_spec("triton.backends.nvidia") is None,
    reason="this Triton has no compiler for NVIDIA GPUs",
)


def on_a_gpu(patch: pytest.MonkeyPatch, *modules: ModuleType) -> ModuleType:
    """The last of the modules as it is where Triton has a device.

    On a CPU they have no kernels. Each is loaded once more from its file, and those
    after it import it.
    """
    patch.delenv("TRITON_INTERPRET", raising=False)
    utils = importlib.import_module("vllm.triton_utils")
    patch.setattr(utils, "HAS_TRITON", True)
    patch.setattr(utils, "triton", importlib.import_module("triton"))
    patch.setattr(utils, "tl", importlib.import_module("triton.language"))
    for module in modules:
        assert module.__file__ is not None
        spec = importlib.util.spec_from_file_location("on_a_gpu", module.__file__)
        assert spec is not None and spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
        patch.setitem(sys.modules, module.__name__, made)
    return made


def for_hopper(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    **options: Any,
) -> Any:
    """Compile a kernel as Triton specializes it for the addresses and widths of models.

    Args:
        kernel: the function.
        types: of arguments that are no 32-bit integers.
        constants: by argument.
        options: of the compiler.

    """
    from triton import compile as compile_source
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    places = {name: (number,) for number, name in enumerate(kernel.arg_names)}
    types = {**types, **dict.fromkeys(constants, "constexpr")}
    aligned = [
        name for name in places if name.endswith(("_ptr", "stride")) or name == "width"
    ]
    source = ASTSource(
        kernel,
        {name: types.get(name, "i32") for name in kernel.arg_names},
        constexprs={places[name]: value for name, value in constants.items()},
        attrs={places[name]: [["tt.divisibility", 16]] for name in aligned},
    )
    return compile_source(source, target=GPUTarget("cuda", 90, 32), options=options)


def resources(folder: Path, made: Any) -> tuple[int, int]:
    """Registers and bytes of stack of a thread of a compiled kernel."""
    triton = importlib.import_module("triton")
    path = folder / "kernel.cubin"
    path.write_bytes(made.asm["cubin"])
    told = subprocess.run(
        [triton.knobs.nvidia.cuobjdump.path, "-res-usage", path],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert found is not None, told
    return int(found[1]), int(found[2])
