# SPDX-License-Identifier: Apache-2.0
"""Gates that cross three pipeline stages, whose ranks are in this process."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.v1.steering.worker.test_phase import (
    CPU,
    WIDTH,
    Requests,
    begun,
    made,
    tiers,
    view,
)
from vllm.model_executor.layers.residual.capture_op import Launch
from vllm.model_executor.layers.residual.program_op import intervene_rows
from vllm.v1.steering.conditions import Condition, Scope
from vllm.v1.steering.operations import Details, Operation, operation
from vllm.v1.steering.worker.worker import WorkerSteering

pytestmark = pytest.mark.usefixtures("no_engine")
STAGES = ((0, 1), (2, 3), (4, 5))
PROBE = torch.eye(WIDTH)[0]


def stage(layers: tuple[int, ...]) -> WorkerSteering:
    config: Any = SimpleNamespace(
        steering_config=SimpleNamespace(num_rows=11, bank_bytes=0),
        capture_config=SimpleNamespace(step_consumers=[]),
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=None),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
    )
    taps = [(layer, "post_block") for layer in layers]
    return WorkerSteering(config, taps, WIDTH, torch.float32, CPU)


def gated(acts: int, reads: int, scope: Scope, in_prompt: bool = False) -> Operation:
    """Replace the stream by ones where its first value at the probe is above 0."""
    when = Condition(
        reads,
        "post_block",
        PROBE.numpy().tobytes(),
        0.0,
        False,
        True,
        0.0,
        0.0,
        scope,
        "",
        in_prompt=in_prompt,
    )
    ones, details = torch.ones(WIDTH).numpy(), Details(when=when)
    return operation(
        (acts, "post_block"), "replace", ones, 1.0, (None, None), False, None, details
    )


class Pipeline:
    """Three stages through which steps pass."""

    def __init__(self) -> None:
        self.stages = [stage(layers) for layers in STAGES]
        self.sent: list[set[str]] = []
        """The further tensors that each stage has sent in the last step."""

    def begin(self, requests: Requests, operations: list[Operation]) -> None:
        for one in self.stages:
            begun(one, requests, tiers(base=operations))

    def step(self, requests: Requests, first_values: list[float]) -> list[bool]:
        """Run a step with these first values; returns which tokens were changed."""
        tensors: dict[str, Any] = {}
        self.sent = []
        stream = torch.full((len(first_values), WIDTH), 7.0)
        stream[:, 0] = torch.tensor(first_values)
        for number, one in enumerate(self.stages):
            if number:
                one.receive(tensors, lambda: None)
            Launch.taps = one.plan_step(view(requests))
            one.begin_step()
            assert not tensors, "received tensors do not reach the model"
            for layer in STAGES[number]:
                _, _, index, rows, gates = one.tensors((layer, "post_block"))
                intervene_rows(stream, None, index, rows, gates, False)
            one.end_step()
            tensors = one.send({})
            self.sent.append(set(tensors))
        return (stream == 1).all(dim=1).tolist()


@pytest.mark.parametrize(
    ("reads", "acts"), [(0, 1), (0, 3), (0, 5), (2, 3), (2, 5), (4, 5)]
)
def test_a_token_decides_for_a_layer_of_any_later_stage(reads: int, acts: int) -> None:
    pipeline, requests = Pipeline(), [(0, 2, 2), (3, 1, 2)]
    pipeline.begin(requests, [gated(acts, reads, "token")])
    assert pipeline.step(requests, [1.0, -1.0, 2.0]) == [True, False, True]
    crossed = [reads // 2 <= number < acts // 2 for number in range(3)]
    assert ["steering_gates" in names for names in pipeline.sent] == crossed
    assert pipeline.step([(2, 1, 2), (4, 1, 2)], [1.0, -1.0]) == [True, False]
    assert pipeline.step([(3, 1, 2), (5, 1, 2)], [-1.0, 1.0]) == [False, True]


def test_an_opened_gate_holds_for_later_tokens_of_any_stage() -> None:
    pipeline, requests = Pipeline(), [(0, 3, 3), (0, 2, 2)]
    operations = [gated(5, 0, "rest", True), gated(3, 2, "rest", True)]
    pipeline.begin(requests, operations)
    values = [-1.0, 1.0, -1.0, -1.0, -1.0]
    assert pipeline.step(requests, values) == [False, True, True, False, False]
    assert pipeline.step([(3, 1, 3), (2, 1, 2)], [-1.0, -1.0]) == [True, False]
    assert pipeline.step([(4, 1, 3), (3, 1, 2)], [-1.0, 1.0]) == [True, True]
    assert pipeline.step([(5, 1, 3), (4, 1, 2)], [-1.0, -1.0]) == [True, True]


def test_firings_of_all_stages_are_counted_once() -> None:
    pipeline, requests = Pipeline(), [(0, 3, 3)]
    operations = [gated(1, 0, "token"), gated(3, 2, "token"), gated(5, 0, "token")]
    pipeline.begin(requests, operations)
    last = pipeline.stages[-1]
    for values, opened in (([1.0, -1.0, 2.0], 2), ([-1.0], 0), ([1.0], 1)):
        pipeline.step([(0, len(values), 3)], values)
        found = last.take_fired()
        assert found is not None
        counts = {layer: count for _, layer, _, count in found.collect()}
        assert counts == ({0: opened, 2: opened} if opened else {})


def test_a_step_without_conditions_sends_nothing() -> None:
    pipeline, requests = Pipeline(), [(0, 2, 2)]
    pipeline.begin(requests, [made("project_out")])
    pipeline.step(requests, [1.0, 2.0])
    assert pipeline.sent == [set(), set(), set()]
