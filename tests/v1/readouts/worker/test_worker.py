# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages in one process give the results of one stage."""

import sys
from collections.abc import Callable, Mapping, Set
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn

from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.utils import get_pp_indices
from vllm.v1.capture.staging.slot_mapping import slots_of
from vllm.v1.readouts.core.scheduler import ReadoutScheduling, take_parts
from vllm.v1.readouts.frontend.collector import result_of
from vllm.v1.readouts.results import ReadoutResult
from vllm.v1.readouts.worker import worker
from vllm.v1.readouts.worker.head_parts import HeadParts
from vllm.v1.residual.readout_plan import (
    Probe,
    Readout,
    ReadoutPart,
    ReadoutPlan,
    StepReadouts,
)
from vllm.v1.residual.row_blocks import LocalGroup
from vllm.v1.residual.step_layout import StepLayout
from vllm.v1.residual.step_view import StepView
from vllm.v1.residual.tap import Tap

LAYERS, HIDDEN, VOCABULARY, SLOTS = 4, 8, 32, 256
PROMPTS = {"a": 6, "b": 3, "c": 5}
STEPS: list[dict[str, tuple[int, int]]] = [
    {"a": (0, 4), "b": (0, 3)},
    {"a": (4, 2), "b": (3, 1), "c": (0, 1)},
    # The same layout again, in which a prompt is computed token by token.
    {"a": (6, 1), "b": (4, 1), "c": (1, 1)},
    {"a": (7, 1), "b": (5, 1), "c": (2, 1)},
    {"a": (8, 1), "b": (6, 1), "c": (3, 1)},
    {"b": (7, 1)},
    # Preempted requests are computed again.
    {"a": (0, 9), "b": (8, 1), "c": (0, 5)},
    {"a": (9, 1), "b": (9, 1), "c": (5, 1)},
    {"a": (10, 1), "b": (10, 1), "c": (6, 1)},
    # Two batches that alternate, and one again.
    {"a": (11, 1)},
    {"b": (11, 1), "c": (7, 1)},
    {"a": (12, 1)},
    {"b": (12, 1), "c": (8, 1)},
    {"a": (13, 1)},
    {"b": (13, 1), "c": (9, 1)},
    {"a": (14, 1), "b": (14, 1), "c": (10, 1)},
    {"a": (15, 1), "b": (15, 1), "c": (11, 1)},
]
"""`(first position, tokens)` of each request."""


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def row(req_id: str, position: int) -> torch.Tensor:
    """`[layers, hidden_size]`"""
    return draw(LAYERS, HIDDEN, seed=100 * ord(req_id) + position)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Identity() for _ in range(LAYERS))
        self.norm = nn.Identity()
        self.head = draw(VOCABULARY, HIDDEN, seed=1)

    def compute_logits(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self.head.T


def summed(rows: torch.Tensor, context: Any) -> torch.Tensor:
    return rows.float().prod(1).sum(-1) + torch.tensor(context.positions)


def block(*layers: int) -> tuple[Tap, ...]:
    return tuple((layer, "post_block") for layer in layers)


def readouts(prompt: int) -> tuple[Readout, ...]:
    everything, generated = ((0, 1 << 30),), ((prompt, 1 << 30),)
    vectors = draw(2, HIDDEN, seed=2).numpy().tobytes()
    probe = Probe(vectors, (0.5, -0.5))
    code = cloudpickle.dumps(summed)
    return (
        *(
            Readout(f"probe{layer}", "probe", block(layer), everything, probe=probe)
            for layer in range(LAYERS)
        ),
        Readout("last", "probe", block(1), ((prompt - 1, prompt),), probe=probe),
        Readout("lens", "lens", block(0, 1, 2, 3), everything, top_k=3, tokens=(5,)),
        Readout("some", "lens", block(1, 3), generated, top_k=3, tokens=(5,)),
        Readout("late", "lens", block(3), generated, top_k=3, tokens=(5,)),
        Readout("norms", "norm", block(3, 0, 2, 1), everything),
        Readout("norm", "norm", block(1), generated),
        Readout("rows", "rows", block(2, 0), everything),
        Readout("mean", "rows", block(3, 1), ((0, prompt),), reduce="mean"),
        Readout("most", "rows", block(0, 2, 3), everything, reduce="max"),
        Readout("both", "custom", block(0, 3), everything, code=code),
        Readout("one", "custom", block(1), generated, code=code),
    )


class Stage:
    """A pipeline stage: its layers' staged rows, and what it computes of them."""

    def __init__(self, own: int, count: int, patch: Callable[..., None]) -> None:
        self.layers = range(*get_pp_indices(LAYERS, own, count))
        self._columns = {tap: i for i, tap in enumerate(block(*self.layers))}
        self._layout = StepLayout(list(range(len(self.layers))), SLOTS, None, count)
        patch(worker, "get_pp_group", lambda: SimpleNamespace(rank_in_group=own))
        model, config = Model(), configuration(count)
        last = model.layers[-1] if own == count - 1 else None
        nothing: Any = {}
        cpu = torch.device("cpu")
        self.readouts = worker.WorkerReadouts(
            config, nothing, model, last, cpu, {}, HeadParts({})
        )

    def add(self, req_id: str, plan: ReadoutPlan) -> None:
        groups = tuple(
            LocalGroup((tap,), (self._columns[tap],), ranges, ())
            for tap, ranges in plan.staged.items()
            if tap in self._columns
        )
        self._layout.add(req_id, groups)
        self.readouts.add_request(req_id, plan, groups, PROMPTS[req_id])

    def step(self, step: Mapping[str, tuple[int, int]], tensors: Any) -> Any:
        """Read out a step; returns what is sent to the next stage."""
        self.readouts.receive(tensors)
        starts, counts = np.array(list(step.values())).T
        view = StepView(list(step), starts, counts, int(counts.sum()))
        placed = self._layout.place(view)
        staging = torch.full((SLOTS, HIDDEN), float("nan"))
        if placed is not None:
            columns = range(len(self.layers))
            slots = slots_of(placed.layout, columns, view.num_rows)
            tokens = [(r, p) for r, (a, n) in step.items() for p in range(a, a + n)]
            for token, (req_id, position) in enumerate(tokens):
                for column, layer in enumerate(self.layers):
                    if (slot := slots[column, token]) >= 0:
                        staging[slot] = row(req_id, position)[layer]
        self.readouts.run(placed, view, staging, 0)
        return self.readouts.send({})


def configuration(stages: int) -> Any:
    model = SimpleNamespace(
        dtype=torch.float32,
        is_encoder_decoder=False,
        get_total_num_hidden_layers=lambda: LAYERS,
        get_hidden_size=lambda: HIDDEN,
        get_vocab_size=lambda: VOCABULARY,
    )
    parallel = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=stages)
    return SimpleNamespace(
        model_config=model,
        parallel_config=parallel,
        lora_config=None,
        max_concurrent_batches=stages,
        speculative_config=None,
        num_speculative_tokens=0,
        scheduler_config=SimpleNamespace(async_scheduling=False),
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.NONE),
    )


def read_out(
    count: int,
    monkeypatch: pytest.MonkeyPatch,
    kinds: Set[str] = frozenset(("probe", "lens", "norm", "rows", "custom")),
) -> dict[tuple[str, str], ReadoutResult]:
    """All results of all requests, over `count` stages."""
    monkeypatch.setattr(worker, "get_tensor_model_parallel_rank", lambda: 0)
    stages = [Stage(own, count, monkeypatch.setattr) for own in range(count)]
    plans = {
        req_id: ReadoutPlan(
            tuple(one for one in readouts(n) if {one.kind, one.name} & kinds)
        )
        for req_id, n in PROMPTS.items()
    }
    for one in stages:
        for req_id, plan in plans.items():
            one.add(req_id, plan)
    scheduling = ReadoutScheduling()
    parts: dict[tuple[str, str], list[ReadoutPart]] = {}
    requests = {req_id: request(req_id, plan) for req_id, plan in plans.items()}
    for own in requests.values():
        scheduling.add_request(own)
    for step in STEPS:
        tensors: Any = {}
        for one in stages:
            tensors = one.step(step, tensors)
        pending = stages[-1].readouts.take()
        assert not tensors
        results = StepReadouts({}, 0, {}) if pending is None else pending.collect()
        for req_id, (start, tokens) in step.items():
            own = requests[req_id]
            own.num_tokens = start + tokens
            new = [1] if start + tokens >= PROMPTS[req_id] else []
            scheduling.take(own, results, tokens, new)
            for part in take_parts(own) or ():
                parts.setdefault((req_id, part.name), []).append(part)
    return {
        (req_id, one.name): result_of(one, parts[req_id, one.name], 1 << 30)
        for req_id, plan in plans.items()
        for one in plan.readouts
    }


def request(req_id: str, plan: ReadoutPlan) -> Any:
    params = SimpleNamespace(_capture_plan=SimpleNamespace(readouts=plan))
    return SimpleNamespace(
        request_id=req_id,
        sampling_params=params,
        num_tokens=0,
        num_prompt_tokens=PROMPTS[req_id],
    )


@pytest.mark.parametrize("count", [2, 3, 4])
def test_stages_give_what_one_gives(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, split = read_out(1, monkeypatch), read_out(count, monkeypatch)
    for key, one in whole.items():
        other = split[key]
        assert one.error is None and other.error is None
        assert other.positions == one.positions and other.taps == one.taps, key
        assert one.arrays and other.arrays.keys() == one.arrays.keys()
        for name, values in one.arrays.items():
            np.testing.assert_allclose(other[name], values, 1e-5, err_msg=str(key))
        if key[1] == "last":
            assert one.positions == [PROMPTS[key[0]] - 1]


def test_batches_that_alternate_keep_their_jobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []

    def making(make: Any, *given: Any) -> Any:
        made.append(make)
        return make(*given)

    for name in ("make_job_set", "make_joined_set"):
        monkeypatch.setattr(worker, name, partial(making, getattr(worker, name)))
    usual = {"a": (9, 1), "b": (9, 1), "c": (7, 1)}
    batches = [{"a": (9, 1)}, {"b": (9, 1), "c": (7, 1)}]
    again = [{r: (at + 1, 1) for r, (at, _) in one.items()} for one in batches]
    monkeypatch.setattr(sys.modules[__name__], "STEPS", [usual, *batches, *again])
    read_out(2, monkeypatch, {"lens"})
    # By the first step, and by the first of each batch, at both stages.
    assert [made.count(one) for one in dict.fromkeys(made)] == [6, 3]


def test_a_preempted_prompt_is_reduced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = read_out(1, monkeypatch)
    for req_id, prompt in PROMPTS.items():
        rows = torch.stack([row(req_id, position) for position in range(prompt)])
        mean, most = found[req_id, "mean"], found[req_id, "most"]
        expected = rows[:, [3, 1]].mean(0).numpy()
        np.testing.assert_allclose(mean["rows"], expected, 1e-5)
        ends = [a + n for step in STEPS for r, (a, n) in step.items() if r == req_id]
        assert most.positions == list(range(max(ends)))
        assert all(a < b for a, b in pairwise(found[req_id, "lens"].positions))
