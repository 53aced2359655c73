# SPDX-License-Identifier: Apache-2.0
"""Runs cases in separate processes, forked from a server with all imports.

An engine and the library's model never share a process: upstream's Transformers
backend changes the library's modules.
"""

import multiprocessing
import os
import re
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.parity.cases import Case
from tests.parity.comparison import Compared, compare

LOG = "\n--- log\n"
RAISED = re.compile(r"[\w.]*(Error|Exception|Exit)\b")
TIMEOUT = 280.0
"""Timeout of one process, in seconds."""


class CaseFailed(Exception):
    """A process of a case ended without a result."""

    @property
    def summary(self) -> str:
        """The last line of the process's traceback."""
        lines = str(self).split(LOG)[0].strip().splitlines()
        raised = [line for line in lines if RAISED.match(line)]
        return (raised or lines or ["no message"])[-1][:300]


ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # Products of float32 in full precision: a GPU would round their factors to ten
    # bits.
    "TRITON_F32_DEFAULT": "ieee",
    "NVIDIA_TF32_OVERRIDE": "0",
    # With attention and MLP in two streams of the device a layer is refused.
    "VLLM_COHERE2_ATTN_MOE_DUAL_STREAM_TOKEN_THRESHOLD": "0",
}
"""Environment of the server's processes, unless this process sets it."""


def _server() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.parity.preload"])
    with patch.dict(os.environ, ENVIRONMENT | dict(os.environ)):
        forkserver.ensure_running()
    return context


def _within(task: Callable[..., None], folder: Path, *arguments: Any) -> None:
    """Run in the new process: write the task's output and exception to files."""
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        torch.set_num_threads(1)
        task(folder, *arguments)
    except BaseException:
        (folder / "error").write_text(traceback.format_exc())
        os._exit(1)
    # Exit without finalizers: an engine that is still running must not block the exit.
    os._exit(0)


def _run(task: Callable[..., None], folder: Path, *arguments: Any) -> None:
    process = _server().Process(target=_within, args=(task, folder, *arguments))
    process.start()
    process.join(TIMEOUT)
    if process.is_alive():
        process.kill()
        raise CaseFailed(f"{task.__name__} took more than {TIMEOUT} s")
    if process.exitcode != 0:
        error = folder / "error"
        text = error.read_text() if error.exists() else f"exit {process.exitcode}"
        log = (folder / "log").read_text()[-1500:]
        raise CaseFailed(f"{text.strip()}{LOG}{log}")


ON_CUDA = {"kv_cache_memory_bytes": 256 * 2**20, "gpu_memory_utilization": 0.05}
"""Arguments of every engine on a GPU: several share it, so none may measure the free
memory."""


def _ask(folder: Path, case: Case, device: str, options: dict[str, Any]) -> None:
    from tests.parity import engine

    model = case.save(folder)[1]
    chosen = dict(case.on_cpu) if device == "cpu" else ON_CUDA
    answers = engine.run(case, model, **chosen | options)
    torch.save(answers, folder / "answers.pt")


def _compare(folder: Path, case: Case) -> None:
    from tests.parity import bounds
    from tests.support.hf_reference import Reference

    answers = torch.load(folder / "answers.pt", weights_only=False)

    def library(dtype: torch.dtype) -> Reference:
        chosen = (case.recipe, case.substitute, case.loader)
        return Reference(folder / "library", dtype, *chosen, watches_inside=True)

    exact = library(torch.float32)
    if case.torch_dtype == torch.float32:
        allowed = bounds.in_float32(exact)
    else:
        allowed = bounds.in_bfloat16(answers, exact, library(case.torch_dtype))
    compared = compare(answers, exact, allowed, case.differing)
    torch.save((compared, answers.hook_points), folder / "compared.pt")


def prove(
    case: Case, device: str = "cpu", **options: Any
) -> tuple[Compared, dict[int, tuple[str, ...]]]:
    """Compare a case with the library; returns the result and hook points by layer.

    Args:
        case: the case to compare.
        device: the engine's device; the library always runs on the CPU.
        options: further arguments of the engine.

    Raises:
        CaseFailed: a process raised, crashed or hung.
    """
    with tempfile.TemporaryDirectory(prefix="parity-") as name:
        folder = Path(name)
        _run(_ask, folder, case, device, options)
        _run(_compare, folder, case)
        compared, points = torch.load(folder / "compared.pt", weights_only=False)
        return compared, points
