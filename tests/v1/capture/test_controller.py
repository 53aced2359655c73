# SPDX-License-Identifier: Apache-2.0
"""Decisions of a controller, and the queue that takes them, without an engine."""

from typing import Any

import numpy as np
import torch

from vllm.v1.capture import CaptureSpec, SteeringController
from vllm.v1.capture.step_view import StepCaptureView, StepRequestView
from vllm.v1.residual.steering_actions import (
    RequestSteeringOverride,
    SteeringActionQueue,
    SteeringMonitorUpdate,
    SteeringScaleUpdate,
    SteeringVectorUpdate,
)

VECTORS = {"post_block": {0: np.ones(4, dtype=np.float32)}}


class Positive(SteeringController):
    """Decides once a row's first value is above 0."""

    def global_capture_spec(self) -> CaptureSpec:
        return CaptureSpec(hooks={"post_block": [0]}, positions="all")

    large = False
    action: Any = None

    def decide(self, request_view: StepRequestView, residual: torch.Tensor) -> Any:
        if residual[-1, 0] <= 0:
            return None
        if self.action is not None:
            return self.action
        vectors = {"post_block": {0: np.ones(8 if self.large else 4, np.float32)}}
        return RequestSteeringOverride(request_view.req_id, vectors)


def view(value: float, *requests: tuple[str, str | None], phase: Any = "decode") -> Any:
    rows = torch.full((len(requests), 4), value)
    views = [
        StepRequestView(
            req_id=req_id,
            start=number,
            end=number + 1,
            phase=phase,
            token_ids=np.array([-1]),
            conversation_id=conversation,
        )
        for number, (req_id, conversation) in enumerate(requests)
    ]
    return StepCaptureView(0, {(0, "post_block"): rows}, views)


def made(**params: Any) -> Positive:
    return Positive(None, params)  # type: ignore[arg-type]


def decided(controller: Positive, step: Any) -> list[str]:
    return [action.req_id for action in controller.on_step(step) or ()]


def test_a_conversation_is_decided_once_and_its_later_requests_follow() -> None:
    controller = made()
    assert decided(controller, view(1.0, ("a", "c"), phase="prefill")) == []
    assert decided(controller, view(-1.0, ("a", "c"))) == []
    assert decided(controller, view(1.0, ("a", "c"), ("x", None))) == ["a"]
    assert decided(controller, view(1.0, ("a", "c"))) == []
    assert decided(controller, view(-1.0, ("b", "c"), phase="prefill")) == ["b"]
    controller.end_requests(["a", "b"])
    told = controller.status()
    assert (told["triggers"], told["bridges"], told["armed_requests"]) == (1, 1, 0)
    assert (told["latched_conversations"], told["latched_bytes"]) == (1, 16)


def test_the_least_recently_used_decisions_go_first() -> None:
    for params in ({"max_conversations": 2}, {"max_latched_bytes": 32}):
        controller = made(**params)
        for name in "ab":
            assert decided(controller, view(1.0, (name, name))) == [name]
        assert decided(controller, view(-1.0, ("a2", "a"))) == ["a2"]
        assert decided(controller, view(1.0, ("c", "c"))) == ["c"]
        assert controller.status()["latched_conversations"] == 2
        assert decided(controller, view(-1.0, ("later", "b"))) == []
        assert decided(controller, view(-1.0, ("later", "a"))) == ["later"]


def test_a_decision_that_is_too_large_acts_once_and_evicts_nobody() -> None:
    controller = made(max_latched_bytes=20)
    assert decided(controller, view(1.0, ("a", "a"))) == ["a"]
    controller.large = True
    assert decided(controller, view(1.0, ("b", "b"))) == ["b"]
    assert decided(controller, view(-1.0, ("a2", "a"), ("b2", "b"))) == ["a2"]
    assert controller.status()["latched_bytes"] == 16


def test_any_action_may_be_decided() -> None:
    controller = made()
    actions = [
        SteeringVectorUpdate(VECTORS),
        SteeringScaleUpdate(0.5, req_id="a"),
        SteeringMonitorUpdate("post_block", 0, VECTORS["post_block"][0], req_id="a"),
    ]
    for number, action in enumerate(actions):
        controller.action = action
        conversation = str(number)
        assert controller.on_step(view(1.0, (f"first{number}", conversation))) == [
            action
        ]
        later = controller.on_step(view(1.0, (f"later{number}", conversation)))
        if isinstance(action, SteeringVectorUpdate):
            assert later is None  # It holds for all requests already.
        else:
            assert later is not None and later[0].req_id == f"later{number}"  # type: ignore[union-attr]


def test_a_step_without_decisions_has_no_actions() -> None:
    assert made().on_step(view(-1.0, ("a", "c"))) is None


def test_a_full_queue_drops_and_counts() -> None:
    queue = SteeringActionQueue(maxsize=2)
    actions = [SteeringVectorUpdate(VECTORS, source=name) for name in "abc"]
    assert [queue.submit(one) for one in actions] == [True, True, False]
    assert queue.drain() == actions[:2] and queue.drain() == []
    queue.count("applied")
    expected = {"submitted": 2, "dropped": 1, "applied": 1, "rejected": 0}
    assert queue.stats() == expected
