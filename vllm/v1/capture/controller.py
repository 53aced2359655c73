# SPDX-License-Identifier: Apache-2.0
"""A consumer that decides per conversation, once, how its requests are steered."""

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm.v1.capture.step_view import StepCaptureView, StepRequestView
from vllm.v1.capture.sync import SyncCaptureConsumer
from vllm.v1.residual.steering_actions import RequestSteeringOverride

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class SteeringController(SyncCaptureConsumer):
    """Calls `decide` on requests of conversations until it has decided.

    A decision holds for the request, and for later requests of its conversation.

    Params:
        max_conversations: how many decisions are kept; the oldest goes first.
        max_latched_bytes: the most bytes of their vectors.

    """

    def __init__(self, vllm_config: "VllmConfig", params: dict[str, Any]) -> None:
        super().__init__(vllm_config, params)
        self._most = int(params.get("max_conversations", 1024))
        self._most_bytes = int(params.get("max_latched_bytes", 256 << 20))
        self._latched: OrderedDict[str, RequestSteeringOverride] = OrderedDict()
        self._armed: set[str] = set()
        self._bytes = self._triggers = self._bridges = 0

    @abstractmethod
    def decide(
        self, request_view: StepRequestView, residual: torch.Tensor
    ) -> RequestSteeringOverride | None:
        """How the conversation is steered from now on; None decides nothing yet.

        Args:
            request_view: a generating request of a conversation without a decision.
            residual: its rows `[rows, hidden_size]` at the first tap of the spec.

        """

    def on_step(self, view: StepCaptureView) -> Sequence[Any] | None:
        """Decide for requests without a decision; steer those of decided ones."""
        rows = next(iter(view.tensors.values()))
        actions = []
        for one in view.requests:
            conversation = one.conversation_id
            if conversation is None or one.req_id in self._armed:
                continue
            known = self._latched.get(conversation)
            if known is not None:
                self._bridges += 1
                actions.append(replace(known, req_id=one.req_id))
                self._armed.add(one.req_id)
            elif one.phase == "decode":
                found = self.decide(one, rows[one.start : one.end])
                if found is not None:
                    self._triggers += 1
                    self._armed.add(one.req_id)
                    self._latch(conversation, found)
                    actions.append(found)
        return actions

    def end_requests(self, finished: Sequence[str]) -> None:
        """Forget requests that have ended; their conversations are kept."""
        self._armed.difference_update(finished)

    def status(self) -> dict[str, Any]:
        """Counts of decisions."""
        return {
            "latched_conversations": len(self._latched),
            "latched_bytes": self._bytes,
            "armed_requests": len(self._armed),
            "triggers": self._triggers,
            "bridges": self._bridges,
        }

    def _latch(self, conversation: str, found: RequestSteeringOverride) -> None:
        self._latched[conversation] = found
        self._bytes += _size(found)
        while self._latched and (
            len(self._latched) > self._most or self._bytes > self._most_bytes
        ):
            self._bytes -= _size(self._latched.popitem(last=False)[1])


def _size(one: RequestSteeringOverride) -> int:
    layers = (at for at in (one.vectors or {}).values())
    return sum(np.asarray(v).nbytes for at in layers for v in at.values())
