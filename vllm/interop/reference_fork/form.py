# SPDX-License-Identifier: Apache-2.0
"""What the front end of steering calls to translate requests and sets of vectors."""

import threading
from typing import TYPE_CHECKING, Any

from vllm.interop.reference_fork.clamps import as_entries
from vllm.interop.reference_fork.gates import FIELD, Gate, parse_gates
from vllm.interop.reference_fork.named import vectors_of
from vllm.interop.reference_fork.patches import FIELD as PATCH
from vllm.interop.reference_fork.patches import VECTORS as PATCH_VECTORS
from vllm.interop.reference_fork.patches import as_entries as patched
from vllm.v1.steering.errors import fail
from vllm.v1.steering.frontend.forms import Parts
from vllm.v1.steering.plan import SteeringTiers, total

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.steering.frontend.admission import SteeringAdmission

MAX_CONVERSATIONS = 1024
"""Conversations that are remembered; those not used for longest are dropped."""


class ReferenceForkForm:
    """Translates clamps, gates and patches; keeps the gates of conversations.

    Thread-safe.
    """

    request_fields = (
        "steering_clamps",
        "prefill_steering_clamps",
        "decode_steering_clamps",
        FIELD,
        PATCH,
        PATCH_VECTORS,
    )
    set_fields = ("clamps", "prefill_clamps", "decode_clamps")

    def __init__(self, admission: "SteeringAdmission") -> None:
        self._admission = admission
        self._lock = threading.Lock()
        self._conversations: dict[str, list[dict[str, Any]]] = {}

    def translate(self, parts: Parts) -> None:
        """Move clamps and patches to the fields of vectors, as entries."""
        patches, vectors = (
            parts.pop(name, [(None, name)])[0][0] for name in (PATCH, PATCH_VECTORS)
        )
        if patches is not None or vectors is not None:
            entries = [(patched(patches, vectors), PATCH)]
            parts["steering_vectors"] = [*parts.get("steering_vectors", ()), *entries]
        others = {FIELD, PATCH, PATCH_VECTORS}
        for name in {*self.request_fields, *self.set_fields} - others:
            entries = [(as_entries(raw, at), at) for raw, at in parts.pop(name, ())]
            if entries:
                own = name.replace("clamps", "vectors")
                parts[own] = [*parts.get(own, ()), *entries]

    def generated(self, params: "SamplingParams", tiers: SteeringTiers) -> Parts:
        """The entries of a request's gates at generated tokens."""
        gates = self._gates(params)
        for gate in gates:
            if gate.steer is None and tiers.decode_operations:
                raise fail(
                    f"{gate.where}.apply: only additions can be attenuated, and the "
                    "request has operations at generated tokens; leave one of them out",
                    f"{gate.where}.apply",
                    gate.raw["apply"],
                )
        own = total([tiers.base, tiers.decode])
        entries = [(gate.entries(own), gate.where) for gate in gates]
        entries = [(by_hook, where) for by_hook, where in entries if by_hook]
        return {FIELD: entries} if entries else {}

    def admitted(self, params: "SamplingParams") -> None:
        """Remember gates that act in later requests of a conversation."""
        staying = [raw for raw in params.steering or () if _stays(raw)]
        if not staying:
            return
        assert params.conversation_id is not None, "such gates need a conversation"
        with self._lock:
            before = self._conversations.pop(params.conversation_id, [])
            new = [raw for raw in staying if raw not in before]
            self._conversations[params.conversation_id] = before + new
            while len(self._conversations) > MAX_CONVERSATIONS:
                self._conversations.pop(next(iter(self._conversations)))

    def _gates(self, params: "SamplingParams") -> list[Gate]:
        """The request's gates, after those that its conversation has kept."""
        conversation, raw = params.conversation_id, params.steering
        given = [] if raw is None else parse_gates(raw, self._vectors)
        staying = [gate for gate in given if _stays(gate.raw)]
        if staying and not (conversation and self._admission.alone):
            raise fail(
                f"{staying[0].where}.scope: rest_of_conversation needs a "
                "conversation_id, and a server with a single API server process",
                f"{staying[0].where}.scope",
                conversation,
            )
        if conversation is None:
            return given
        kept = self._kept(conversation)
        kept = [one for one in kept if all(one != gate.raw for gate in given)]
        if not kept:
            return given
        where = f"steering kept for the conversation {conversation[:60]!r}"
        return parse_gates(kept, self._vectors, where) + given

    def _vectors(self, kind: str, name: Any, where: str) -> Any:
        return vectors_of(self._admission.modules, kind, name, where)

    def _kept(self, conversation: str) -> list[dict[str, Any]]:
        """The gates that a conversation has kept, as its requests wrote them."""
        with self._lock:
            gates = self._conversations.pop(conversation, None)
            if gates is None:
                return []
            self._conversations[conversation] = gates
            return list(gates)


def _stays(raw: Any) -> bool:
    """Whether a checked gate acts in later requests of the conversation."""
    return bool(raw["scope"] == "rest_of_conversation")
