# SPDX-License-Identifier: Apache-2.0
"""Gates and doses that cross three pipeline stages, with ranks in this process."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.v1.steering.worker.test_phase import (
    WIDTH,
    Requests,
    begun,
    made,
    tiers,
    view,
    worker,
)
from vllm.model_executor.layers.residual.capture_op import Launch
from vllm.model_executor.layers.residual.program_op import intervene_rows
from vllm.model_executor.layers.residual.spread import WHOLE
from vllm.v1.residual.receipts import StepReceipt
from vllm.v1.steering.conditions import Condition, Scope
from vllm.v1.steering.plan import Details, Operation, SteeringTiers, operation, pack
from vllm.v1.steering.receipts import Receipt
from vllm.v1.steering.worker.doses import Route
from vllm.v1.steering.worker.worker import WorkerSteering

pytestmark = pytest.mark.usefixtures("no_engine")
STAGES: tuple[tuple[int, ...], ...] = ((0, 1), (2, 3), (4, 5))
PROBE = torch.eye(WIDTH)[0]


def stage(layers: tuple[int, ...], route: Route) -> WorkerSteering:
    return worker([(layer, "post_block") for layer in layers], route=route)


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
    """Stages through which steps pass."""

    def __init__(self, layers: tuple[tuple[int, ...], ...] = STAGES) -> None:
        last = len(layers) - 1
        self.stages = [
            stage(own, Route.OUTPUT if number == last else Route.NEXT_STAGE)
            for number, own in enumerate(layers)
        ]
        self._layers = layers
        self.sent: list[set[str]] = []
        """The further tensors that each stage has sent in the last step."""

    def begin(self, requests: Requests, operations: list[Operation]) -> None:
        self.load(requests, tiers(base=operations))

    def load(self, requests: Requests, steering: SteeringTiers) -> None:
        for one in self.stages:
            begun(one, requests, steering)

    def told(self) -> dict[str, StepReceipt]:
        """The doses that the last stage returns with a step's output."""
        assert all(one.doses.take() is None for one in self.stages[:-1])
        doses = self.stages[-1].doses.take()
        assert doses is not None
        return doses.collect()

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
            for layer in self._layers[number]:
                _, _, index, rows, gates = one.tensors((layer, "post_block"))
                intervene_rows(stream, None, index, rows, gates, WHOLE)
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


def test_doses_of_all_stages_are_those_of_one_process() -> None:
    """Each stage adds or projects, and the first and the last decide gates."""
    one, three = Pipeline((sum(STAGES, ()),)), Pipeline()
    add = np.random.default_rng(1).normal(size=WIDTH).astype(np.float32)
    project = operation(
        (3, "post_block"), "project_out", add, 0.5, (None, None), False, None
    )
    operations = [
        gated(5, 0, "token"),
        gated(4, 3, "rest", True),
        project,
        project,
    ]
    base = pack({(layer, "post_block"): add for layer in (0, 2, 5)}, operations)
    decode = pack({}, [gated(1, 0, "prompt")])
    steering = SteeringTiers(base=base, decode=decode, receipt=True)
    receipts = Receipt(3), Receipt(3)
    for each in (one, three):
        each.load([(0, 3, 3), (0, 2, 2)], steering)
    begins = ([(0, 3, 3), (0, 2, 2)], [1.0, -1.0, 2.0, -1.0, 1.0])
    for requests, values in (begins, ([(3, 1, 3), (2, 1, 2)], [-1.0, 3.0])):
        one.step(requests, values)
        three.step(requests, values)
        assert all("steering_doses" in names for names in three.sent[:2])
        expected, found = one.told(), three.told()
        assert found.keys() == expected.keys() == {"0", "1"}
        for request, whole in expected.items():
            for part, own in zip(whole.parts, found[request].parts, strict=True):
                assert (own.start, own.effects) == (part.start, part.effects)
                np.testing.assert_array_equal(own.doses, part.doses)
        for receipt, parts in zip(receipts, (expected, found), strict=True):
            receipt.add(parts["0"].parts)
    (expected_receipt, receipt) = (each.as_dict(4) for each in receipts)
    assert receipt == expected_receipt
    assert {one["layer"] for one in receipt["applied"] if one["tokens"]} == {*range(6)}
    assert list(receipt["fired"]) == list(expected_receipt["fired"])


def test_a_step_without_conditions_sends_nothing() -> None:
    pipeline, requests = Pipeline(), [(0, 2, 2)]
    pipeline.begin(requests, [made("project_out")])
    pipeline.step(requests, [1.0, 2.0])
    assert pipeline.sent == [set(), set(), set()]
