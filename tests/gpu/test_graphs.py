# SPDX-License-Identifier: Apache-2.0
"""Rows and steering inside CUDA graphs, compared with runs without graphs."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.gpu.conftest import BF16, GRAPHS, OpenEngine
from tests.support.captured import CapturedEngine, asking, prompt
from tests.support.hf_reference import Reference, Stream, relative_error
from vllm import SamplingParams, envs
from vllm.model_executor.layers.residual import steer_op
from vllm.v1.worker import residual_graph_choice

pytestmark = pytest.mark.gpu

LENGTHS = (5, 16, 31, 64, 7, 130, 3, 40)
GENERATED = 24
LATE = "full, additions late"
"""As in graphs for few rows of a wide stream."""
V1 = {f"{name}, V1": options for name, options in GRAPHS.items() if name != "eager"}
WAYS = (*GRAPHS, LATE, *V1)


class Run(NamedTuple):
    """The results of one way of running a batch."""

    tokens: list[list[int]]
    plain_tokens: list[list[int]]
    """Tokens of the same requests without captures."""
    rows: dict[int, Stream]
    """Rows by the request's index in the batch; every other request is plain."""


def steered(seed: int, scale: float) -> dict[str, Any]:
    """Steering by a vector at one layer and at each point."""
    generator = torch.Generator().manual_seed(seed)
    return {
        hook: {2: {"vector": torch.randn(512, generator=generator), "scale": scale}}
        for hook in ("pre_attn", "post_attn", "post_block")
    }


def requests(capturing: bool) -> list[SamplingParams]:
    """Captured, plain and steered requests, which share their batches."""
    params = []
    for index in range(len(LENGTHS)):
        more = {} if index % 4 < 2 else {"steering_vectors": steered(index, 0.5)}
        common: dict[str, Any] = {"detokenize": False, **more}
        if capturing and index % 2 == 0:
            params.append(asking("all", max_tokens=GENERATED, **common))
        else:
            plain = {"temperature": 0.0, "ignore_eos": True, **common}
            params.append(SamplingParams(max_tokens=GENERATED, **plain))
    return params


def run(engine: CapturedEngine) -> Run:
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    outputs = engine.run(prompts, requests(capturing=True))
    plain = engine.run(prompts, requests(capturing=False))
    for index in range(0, len(LENGTHS), 2):
        found = engine.sidecars(outputs[index])
        assert len(found) == 12
        for sidecar in found.values():
            length = LENGTHS[index] + GENERATED - 1
            assert sidecar["positions"] == list(range(length))
    return Run(
        [list(output.outputs[0].token_ids) for output in outputs],
        [list(output.outputs[0].token_ids) for output in plain],
        {index: engine.rows(outputs[index]) for index in range(0, len(LENGTHS), 2)},
    )


@pytest.fixture(scope="module")
def runs(llama: Path, reference: Reference, open_engine: OpenEngine) -> dict[str, Run]:
    with pytest.MonkeyPatch.context() as patch:
        # So that graphs of just what steps need, recorded while serving, run too.
        patch.setattr(residual_graph_choice, "RECORD_AFTER", 4)
        made = {
            name: run(open_engine(llama, reference=reference, **options))
            for name, options in GRAPHS.items()
        }
        patch.setattr(steer_op, "WIDE", 0)
        made[LATE] = run(open_engine(llama, reference=reference))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        envs.disable_envs_cache()
        for name, options in V1.items():
            made[name] = run(open_engine(llama, reference=reference, **options))
    envs.disable_envs_cache()
    return made


@pytest.mark.parametrize(
    "way", ["full", "piecewise", LATE, "full, V1", "piecewise, V1"]
)
def test_rows_from_graphs_are_those_without_graphs(
    runs: dict[str, Run], way: str
) -> None:
    without = runs["compiled, V1" if way in V1 else "compiled"]
    assert runs[way].tokens == without.tokens
    for index, rows in without.rows.items():
        for tap, expected in rows.items():
            assert runs[way].rows[index][tap].equal(expected), (index, tap)


@pytest.mark.parametrize("way", WAYS)
def test_capture_changes_no_token(runs: dict[str, Run], way: str) -> None:
    assert runs[way].tokens == runs[way].plain_tokens


@pytest.mark.parametrize("way", WAYS)
def test_unsteered_rows_are_the_references(
    runs: dict[str, Run], reference: Reference, way: str
) -> None:
    for index in (0, 4):  # Captured and not steered.
        fed = prompt(LENGTHS[index], seed=LENGTHS[index]) + runs[way].tokens[index]
        expected = reference.stream(fed[:-1])
        for tap, rows in runs[way].rows[index].items():
            assert relative_error(rows, expected[tap]) <= BF16, tap


@pytest.mark.parametrize("way", WAYS)
def test_steered_rows_are_those_of_eager_code(
    runs: dict[str, Run], reference: Reference, way: str
) -> None:
    for index in (2, 6):  # Captured and steered.
        # Greedy tokens may differ between compiled and eager code.
        count = LENGTHS[index]
        unsteered = reference.stream(prompt(count, seed=count))
        for tap, rows in runs[way].rows[index].items():
            expected = runs["eager"].rows[index][tap][:count].float()
            assert relative_error(rows[:count], expected) <= BF16, tap
            moved = relative_error(rows[:count], unsteered[tap]) > BF16
            # A capture sees the stream before its own point's vector.
            layer, hook = tap
            assert moved == (layer > 2 or (layer == 2 and hook != "pre_attn")), tap


def test_a_graph_recorded_while_serving_does_the_same(
    llama: Path,
    reference: Reference,
    open_engine: OpenEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = open_engine(llama, reference=reference)
    worker: Any = engine.llm.llm_engine.model_executor.driver_worker
    manager = worker.worker.model_runner.cudagraph_manager
    started = set(manager.graphs)
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    common: dict[str, Any] = {"detokenize": False, "max_tokens": GENERATED}
    vector = torch.randn(512, generator=torch.Generator().manual_seed(3))
    everyone = [
        asking("all", {"post_attn": [1]}, **common),
        SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            steering_vectors={"pre_attn": {2: {"vector": vector, "scale": 0.5}}},
            **common,
        ),
    ] * (len(LENGTHS) // 2)

    def observe() -> tuple[list[list[int]], list[torch.Tensor]]:
        outputs = engine.run(prompts, everyone)
        rows = [engine.rows(output)[1, "post_attn"] for output in outputs[::2]]
        return [list(output.outputs[0].token_ids) for output in outputs], rows

    tokens, rows = observe()
    assert set(manager.graphs) == started
    monkeypatch.setattr(residual_graph_choice, "RECORD_AFTER", 3)
    for _ in range(2):  # While graphs are recorded, and when all are.
        again, same = observe()
        assert again == tokens
        assert all(a.equal(b) for a, b in zip(rows, same, strict=True))
    assert set(manager.graphs) > started, "nothing was recorded"
    plain = engine.run(
        prompts, SamplingParams(temperature=0.0, ignore_eos=True, **common)
    )
    assert [list(one.outputs[0].token_ids) for one in plain][::2] == tokens[::2]
