# SPDX-License-Identifier: Apache-2.0
"""Programs at hook points on a GPU: the op, and engines that run it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.conftest import BF16, GRAPHS, OpenEngine
from tests.support.captured import CapturedEngine, asking, prompt
from tests.support.hf_reference import Reference
from vllm.model_executor.layers.residual.capture_op import Launch
from vllm.model_executor.layers.residual.inductor_guard import guard_calls, guard_copies
from vllm.model_executor.layers.residual.program import (
    Flag,
    Instruction,
    Kind,
    Program,
    words_of,
)
from vllm.model_executor.layers.residual.tap import ResidualTap

pytestmark = pytest.mark.gpu


def simple(width: int) -> Program:
    """Project out, by an amount that depends on the norm too."""
    u = torch.randn(1, width, device="cuda")
    flags = Flag.DOT | Flag.SAVE_NORM
    return (Instruction(Kind.LINEAR, u / u.norm(), flags=flags, c1=0.1, c2=-1.0),)


def several(width: int) -> Program:
    """Project out, add with norm_match, and clamp, where a probe fires."""
    u, v, w = (torch.randn(1, width, device="cuda") for _ in range(3))
    return (
        Instruction(Kind.PROBE, w, flags=Flag.COSINE, c1=2.0, c3=1.0, gate=3),
        Instruction(Kind.LINEAR, v / v.norm(), flags=Flag.SAVE_NORM, c1=0.1),
        Instruction(Kind.LINEAR, u / u.norm(), flags=Flag.DOT, c2=-1.0),
        Instruction(
            Kind.LINEAR,
            w / w.norm(),
            flags=Flag.DOT,
            c3=1.0,
            low=-0.1,
            high=0.1,
            gate=3,
        ),
    )


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("tokens", "width"), [(1, 2048), (33, 4096), (7, 5120)])
@pytest.mark.parametrize("make", [simple, several])
def test_eager_compiled_and_recorded_are_the_same_bits(
    make: Callable[[int], Program], tokens: int, width: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    instructions = make(width)  # Programs hold the addresses of their vectors.
    words = torch.from_numpy(words_of(instructions)).cuda()
    index = torch.tensor([0, words.data_ptr()], device="cuda")
    rows = (torch.arange(tokens + 3, device="cuda") % 4 != 1).int()
    gates = torch.zeros(tokens + 3, 4, device="cuda")
    tap = ResidualTap(index=index, program_rows=rows, gates=gates)
    Launch.taps = frozenset({index.data_ptr()})
    weight = torch.randn(width, width, device="cuda", dtype=dtype) * 0.02
    given = torch.randn(2, tokens, width, device="cuda").to(dtype)
    out = torch.zeros_like(given)

    def layer() -> None:
        hidden = given[0] @ weight
        found = tap(hidden, given[1].clone())
        assert found[1] is not None
        out[0].copy_(found[0])
        out[1].copy_(found[1])

    def visit(pair: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden, residual = tap(pair[0] @ weight, pair[1].clone())
        assert residual is not None
        return hidden, residual

    layer()
    eager = out.clone()
    untouched = given[0, 1::4] @ weight
    assert torch.equal(eager[1, 1::4], given[1, 1::4])
    torch.testing.assert_close(eager[0, 1::4], untouched)
    assert tokens == 1 or not torch.equal(eager[0, 0], given[0, 0] @ weight)
    guard_calls()
    guard_copies()
    fresh = torch._inductor.config.patch(force_disable_caches=True)
    torch._dynamo.reset()  # Each case counts as a recompilation of `visit`.
    with torch.no_grad(), fresh:
        compiled = torch.compile(visit, fullgraph=True, dynamic=False)(given)
    assert torch.equal(torch.stack(compiled), eager), "compiled"
    for whole in (False, True):  # With an early start of the kernel.
        Launch.whole = whole
        layer()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layer()
        Launch.whole = False
        for _ in range(5):
            out.zero_()
            graph.replay()
            assert torch.equal(out, eager), f"recorded, early: {whole}"


V = torch.randn(512, generator=torch.Generator().manual_seed(1))
U = (V / V.norm()).double()
W = torch.randn(512, generator=torch.Generator().manual_seed(2))
FIRES = 0.06


def has_fired(rows: torch.Tensor) -> torch.Tensor:
    """Whether one of the rows `[tokens, H]` up to each has a large cosine, `[n, 1]`."""
    cosine = rows @ W.double() / (rows.norm(dim=-1) * W.double().norm())
    return (cosine > FIRES).double().cummax(dim=0).values[:, None]


Change = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Of the rows, given also those at an earlier hook point."""
ENTRIES: dict[str, tuple[dict[str, Any], Change]] = {
    "project_out": (
        {"vector": V, "op": "project_out"},
        lambda x, _: x - (x @ U)[:, None] * U,
    ),
    "clamp": (
        {"vector": V, "op": "clamp", "min": 2.0, "max": 2.5},
        lambda x, _: x + ((x @ U).clamp(2.0, 2.5) - x @ U)[:, None] * U,
    ),
    "norm_match": (
        {"vector": V, "scale": 0.5, "norm_match": True},
        lambda x, _: x + 0.5 * x.norm(dim=-1, keepdim=True) * U,
    ),
    "latched": (
        {
            "vector": V,
            "scale": 2.0,
            "when": {
                "probe": W,
                "layer": 1,
                "hook": "pre_attn",
                "above": FIRES,
                "cosine": True,
                "scope": "rest",
            },
        },
        lambda x, before: x + 2 * has_fired(before) * V.double(),
    ),
    "gated": (
        {
            "vector": V,
            "scale": 2.0,
            "when": {
                "probe": W,
                "layer": 1,
                "hook": "post_block",
                "above": 0.0,
                "sharpness": 0.05,
            },
        },
        lambda x, _: (
            x + 2 * torch.sigmoid(0.05 * (x @ W.double()))[:, None] * V.double()
        ),
    ),
    "replace": (
        {"vector": V, "op": "replace", "positions": [3, 5, 30]},
        lambda x, _: torch.stack(
            [V.double() if i in (3, 5, 30) else row for i, row in enumerate(x)]
        ),
    ),
}
LENGTHS = (20, 17, 29, 8, 40, 33, 5, 37, 6, 26, 12, 31)
AROUND = {"post_block": [1], "pre_attn": [1, 2]}
"""Captures of the stream before and after the operations, and of an earlier one."""


def run(engine: CapturedEngine, steers: bool, generated: int = 24) -> Any:
    """Run requests; every other one is steered and captured."""
    entries = [entry for entry, _ in ENTRIES.values()]
    params = []
    for number in range(len(LENGTHS)):
        more: dict[str, Any] = {"detokenize": False, "logprobs": 5}
        if steers and number % 2:
            more["steering_vectors"] = {"post_block": {1: entries[number // 2]}}
        params.append(asking("all", AROUND, generated, **more))
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    return engine.run(prompts, params)


def said(output: Any) -> list[dict[int, float]]:
    """Log-probabilities of the likeliest tokens."""
    return [
        {token: one.logprob for token, one in row.items()}
        for row in output.outputs[0].logprobs
    ]


@pytest.mark.parametrize("way", GRAPHS)
def test_operations_do_what_they_say_however_a_step_runs(
    llama: Path, reference: Reference, open_engine: OpenEngine, way: str
) -> None:
    engine = open_engine(llama, reference=reference, **GRAPHS[way])
    plain, steered = run(engine, False), run(engine, True)
    for number, (before, behind) in enumerate(zip(plain, steered, strict=True)):
        if number % 2 == 0:
            assert said(before) == said(behind), "a neighbour's bits have changed"
            continue
        rows = engine.rows(behind)
        given, found = rows[1, "post_block"].double(), rows[2, "pre_attn"].double()
        name = list(ENTRIES)[number // 2]
        expected = ENTRIES[name][1](given, rows[1, "pre_attn"].double())
        error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.max() < BF16, (way, name, error.max())
        assert (found - given).abs().max() > 0.1, f"{name} did nothing"
        assert said(before) != said(behind)
