# SPDX-License-Identifier: Apache-2.0
"""A consumer that decides per conversation, once, how its requests are steered."""

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm.logger import init_logger
from vllm.v1.capture.step_view import StepCaptureView, StepRequestView
from vllm.v1.capture.sync import SyncCaptureConsumer
from vllm.v1.residual.steering_actions import Action

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)


class SteeringController(SyncCaptureConsumer):
    """Calls `decide` on requests of conversations until it has decided.

    A decision holds for the request, and for later requests of its conversation. It is
    any action; one that names a request is repeated for those later requests.

    Params:
        max_conversations: how many decisions are kept; the least recently used goes
            first.
        max_latched_bytes: the most bytes of their vectors. A decision with more acts on
            its request, and is not kept for later ones.

    """

    def __init__(self, vllm_config: "VllmConfig", params: dict[str, Any]) -> None:
        super().__init__(vllm_config, params)
        self._most = max(1, int(params.get("max_conversations", 1024)))
        self._most_bytes = int(params.get("max_latched_bytes", 256 << 20))
        self._latched: OrderedDict[str, Action] = OrderedDict()
        self._armed: set[str] = set()
        self._bytes = self._triggers = self._bridges = 0

    @abstractmethod
    def decide(
        self, request_view: StepRequestView, residual: torch.Tensor
    ) -> Action | None:
        """How the conversation is steered from now on; None decides nothing yet.

        Args:
            request_view: a generating request of a conversation without a decision.
            residual: its rows `[rows, hidden_size]` at the first tap of the spec.

        """

    def on_step(self, view: StepCaptureView) -> Sequence[Action] | None:
        """Decide for requests without a decision; steer those of decided ones."""
        rows = next(iter(view.tensors.values()))
        actions = []
        for request in view.requests:
            conversation = request.conversation_id
            if conversation is None or request.req_id in self._armed:
                continue
            if conversation in self._latched:
                actions += self._follow(conversation, request.req_id)
            elif request.phase == "decode":
                action = self.decide(request, rows[request.start : request.end])
                if action is not None:
                    self._triggers += 1
                    self._armed.add(request.req_id)
                    self._latch(conversation, action)
                    actions.append(action)
        return actions or None

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

    def _follow(self, conversation: str, req_id: str) -> list[Action]:
        """The conversation's decision for one more request."""
        self._latched.move_to_end(conversation)
        self._armed.add(req_id)
        self._bridges += 1
        known = self._latched[conversation]
        if getattr(known, "req_id", None) is None:
            return []  # It holds for all requests already.
        return [replace(known, req_id=req_id)]  # type: ignore[arg-type]

    def _latch(self, conversation: str, action: Action) -> None:
        size = _size(action)
        if size > self._most_bytes:
            logger.warning(
                "A decision of %d bytes is not kept for its conversation: at most %d "
                "are allowed (max_latched_bytes)",
                size,
                self._most_bytes,
            )
            return
        self._latched[conversation] = action
        self._bytes += size
        while len(self._latched) > self._most or self._bytes > self._most_bytes:
            self._bytes -= _size(self._latched.popitem(last=False)[1])


def _size(action: Action) -> int:
    layers = (getattr(action, "vectors", None) or {}).values()
    arrays = [vector for at in layers for vector in at.values()]
    arrays.append(getattr(action, "probe", None))
    return sum(np.asarray(one).nbytes for one in arrays if one is not None)
