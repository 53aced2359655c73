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
    SteeringVectorUpdate,
)

VECTORS = {"post_block": {0: np.ones(4, dtype=np.float32)}}


class Positive(SteeringController):
    """Decides once a row's first value is above 0."""

    def global_capture_spec(self) -> CaptureSpec:
        return CaptureSpec(hooks={"post_block": [0]}, positions="all")

    def decide(
        self, request_view: StepRequestView, residual: torch.Tensor
    ) -> RequestSteeringOverride | None:
        if residual[-1, 0] <= 0:
            return None
        return RequestSteeringOverride(request_view.req_id, VECTORS)


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


def test_the_oldest_decisions_go_first() -> None:
    for params in ({"max_conversations": 2}, {"max_latched_bytes": 32}):
        controller = made(**params)
        for name in "abc":
            assert decided(controller, view(1.0, (name, name))) == [name]
        assert controller.status()["latched_conversations"] == 2
        assert decided(controller, view(-1.0, ("later", "a"))) == []
        assert decided(controller, view(-1.0, ("later", "c"))) == ["later"]


def test_a_full_queue_drops_and_counts() -> None:
    queue = SteeringActionQueue(maxsize=2)
    actions = [SteeringVectorUpdate(VECTORS, source=name) for name in "abc"]
    assert [queue.submit(one) for one in actions] == [True, True, False]
    assert queue.drain() == actions[:2] and queue.drain() == []
    queue.count("applied")
    expected = {"submitted": 2, "dropped": 1, "applied": 1, "rejected": 0}
    assert queue.stats() == expected
