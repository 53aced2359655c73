# SPDX-License-Identifier: Apache-2.0
"""The program kernel, interpreted on the CPU, does what the reference does."""

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from vllm.model_executor.layers.residual import program_kernel
from vllm.model_executor.layers.residual.program import (
    GATE_COLUMNS,
    GATES,
    NEVER,
    OPENED,
    SEGMENT,
    STORED,
    Activation,
    Flag,
    Instruction,
    Kind,
    Program,
    run,
    words_of,
)

pytest.importorskip("triton")

WIDTH, TOKENS = 48, 9
SEGMENTS = [4] * 5 + [5] * 3 + [8]
"""The first token of each token's request."""


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def unit(*shape: int) -> torch.Tensor:
    return torch.nn.functional.normalize(draw(*shape), dim=-1)


def programs(doses: torch.Tensor, fired: torch.Tensor) -> list[Program]:
    """Programs of consecutive hook points that have every kind and flag."""
    u, v, w = unit(4, WIDTH), draw(5, WIDTH), unit(16, WIDTH)
    latch = Flag.KEEP | Flag.LATCH
    probes = (
        Instruction(
            Kind.PROBE, v[:1], flags=latch, c2=20.0, c3=1.0, gate=2, fired=fired
        ),
        Instruction(Kind.PROBE, v[1:2], flags=Flag.COSINE, c1=3.0, c3=-1.0, gate=3),
        Instruction(
            Kind.PROBE, v[2:3], flags=Flag.VALUE | Flag.STANDARD, gate=STORED + 3
        ),
        Instruction(Kind.MEASURE, v[3:4], doses=doses[:, 0]),
    )
    acts = (
        Instruction(Kind.LINEAR, v[:1], flags=Flag.LATCH, c0=0.5, gate=2),
        Instruction(
            Kind.LINEAR,
            v[1:2],
            flags=Flag.CARRIED | Flag.ONLY_ACTIVE,
            c0=0.2,
            c1=-0.1,
            bias=torch.tensor([0.3]),
            threshold=torch.tensor([0.4]),
            stored=STORED + 3,
            gate=3,
            doses=doses[:, 1],
        ),
        Instruction(Kind.REPLACE, v[4:5], alpha=0.25, mask=draw(WIDTH).sigmoid()),
        Instruction(Kind.LINEAR, u[:1], flags=Flag.SAVE_NORM, c1=0.1),
        Instruction(Kind.LINEAR, u[1:2], flags=Flag.DOT, c2=-0.5, gate=3),
        Instruction(Kind.LINEAR, u[2:3], flags=Flag.DOT, c3=1.0, low=-0.1, high=0.1),
    )
    more = (
        Instruction(Kind.ROTATE, u[3:4], write=u[:1] - (u[:1] @ u[3]) * u[3], c0=0.6),
        Instruction(
            Kind.LOW_RANK,
            w[:3],
            write=w[3:6],
            flags=Flag.COSINE,
            activation=Activation.RELU,
            c1=0.7,
            bias=torch.tensor([0.1, 0.0, -0.1]),
            doses=doses[:, 2],
        ),
        Instruction(
            Kind.LOW_RANK,
            w[6:8],
            write=w[8:10],
            flags=Flag.STANDARD | Flag.ONLY_ACTIVE,
            activation=Activation.JUMPRELU,
            threshold=torch.tensor([0.1, 0.2]),
            own_c0=torch.tensor([0.5, 0.1]),
            own_c1=torch.tensor([-1.0, 0.5]),
        ),
        Instruction(Kind.REPLACE, v, c0=1.0, alpha=0.5, offset=-4, gate=3),
    )
    return [probes, acts, more]


def state() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gates as before a pass, doses, and a count."""
    gates = torch.zeros(TOKENS, GATE_COLUMNS)
    noted = gates.view(torch.int32)
    noted[:, SEGMENT] = torch.tensor(SEGMENTS, dtype=torch.int32)
    noted[:, OPENED:SEGMENT] = NEVER
    gates[8, 2] = 1.0  # Open since an earlier step.
    return gates, torch.zeros(TOKENS, 3), torch.zeros(1, dtype=torch.int64)


def kernels() -> ModuleType:
    """The kernel's module, as it is where Triton has a device."""
    utils = importlib.import_module("vllm.triton_utils")
    utils.HAS_TRITON = True  # type: ignore[attr-defined]
    utils.triton = importlib.import_module("triton")  # type: ignore[attr-defined]
    utils.tl = importlib.import_module("triton.language")  # type: ignore[attr-defined]
    path = Path(program_kernel.__file__)
    spec = importlib.util.spec_from_file_location("interpreted", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compare() -> None:
    """Compare the interpreted kernel with the reference."""
    module = kernels()
    branch, residual = draw(TOKENS, WIDTH), draw(TOKENS, WIDTH + 1)[:, :WIDTH]
    branch[6] += draw(5, WIDTH)[0]  # The second token of its request fires.
    gates, doses, fired = state()
    tokens = torch.arange(4, TOKENS)  # Others have no program.
    expected = (branch + residual)[4:]
    for program in programs(doses, fired):
        expected, _ = run(program, expected, tokens, gates)
    own_gates, own_doses, own_fired = state()
    hidden, other = branch.clone(), residual.clone()
    rows = (torch.arange(TOKENS) >= 4).int()
    for program in programs(own_doses, own_fired):
        words = torch.from_numpy(words_of(program))
        index = torch.tensor([0, words.data_ptr()])
        module.launch_programs(hidden, hidden, other, index, rows, own_gates)
    torch.testing.assert_close((hidden + other)[4:], expected)
    assert torch.equal(hidden[:4], branch[:4]) and torch.equal(other[:4], residual[:4])
    noted, own = (one.view(torch.int32) for one in (gates, own_gates))
    assert torch.equal(noted[:, OPENED:STORED], own[:, OPENED:STORED])
    for part in (slice(GATES), slice(STORED, None)):
        torch.testing.assert_close(own_gates[:, part], gates[:, part])
    torch.testing.assert_close(own_doses, doses)
    assert torch.equal(own_fired, fired)
    assert own[[4, 5, 8], OPENED + 2].tolist() == [NEVER, 6, 8]


@pytest.mark.slow
def test_the_interpreted_kernel_does_what_the_reference_does() -> None:
    """In a process of its own, as Triton decides when it is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", __name__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    compare()
