# SPDX-License-Identifier: Apache-2.0
"""Vectors that gates of requests name, and gates that conversations keep."""

import threading
from collections.abc import Sequence
from typing import Any

from vllm.v1.residual.bounds import listed, shown
from vllm.v1.steering.errors import UnknownModuleError, fail
from vllm.v1.steering.spec.gates import Gate, Layers, unpacked_hooks
from vllm.v1.steering.spec.parse import SteeredModel, parse_vectors

KINDS = ("probe", "steer")
MAX_NAMES = 1024
"""Registered vectors of each kind."""
MAX_NAME = 128
MAX_CONVERSATIONS = 1024
"""Conversations that are remembered; those not used for longest are dropped."""


class GateVectors:
    """Named vectors for gates, by kind; thread-safe."""

    def __init__(self, model: SteeredModel) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._vectors: dict[str, dict[str, Layers]] = {kind: {} for kind in KINDS}
        self._conversations: dict[str, list[dict[str, Any]]] = {}

    def register(self, name: Any, kind: Any, packed: Any) -> None:
        """Add or replace the vectors of a name.

        Raises:
            SteeringValidationError: naming the parameter, the value and the remedy.

        """
        self._check_kind(kind)
        valid = isinstance(name, str) and name.isprintable() and name.strip() == name
        if not valid or not 0 < len(name) <= MAX_NAME:
            raise fail(
                f"name must be printable text of 1 to {MAX_NAME} characters, without "
                "blanks around it",
                "name",
                name,
            )
        layers = unpacked_hooks(packed, "packed")
        parse_vectors(layers, self._model, "packed")
        if kind == "probe" and sum(len(at) for at in layers.values()) != 1:
            raise fail(
                "packed: a probe has one vector at one layer and hook point",
                "packed",
                sorted(layers),
            )
        with self._lock:
            named = self._vectors[kind]
            if len(named) >= MAX_NAMES and name not in named:
                raise fail(
                    f"name: there are {MAX_NAMES} vectors of this kind; unregister one",
                    "name",
                    name,
                )
            named[name] = layers

    def unregister(self, name: Any, kind: Any) -> None:
        """Remove the vectors of a name.

        Raises:
            UnknownModuleError: there are none.
            SteeringValidationError: `kind` is none, or `name` is not text.

        """
        self._check_kind(kind)
        if not isinstance(name, str):
            raise fail("name must be the name of registered vectors", "name", name)
        with self._lock:
            if name not in self._vectors[kind]:
                raise UnknownModuleError(
                    f"name: no {kind} vector is named {shown(name)}; there are "
                    f"{listed(list(self._vectors[kind]))}",
                    parameter="name",
                    value=shown(name),
                )
            del self._vectors[kind][name]

    def names(self) -> dict[str, list[str]]:
        """The names by kind."""
        with self._lock:
            return {kind: sorted(named) for kind, named in self._vectors.items()}

    def resolve(self, kind: str, name: Any, where: str) -> Layers:
        """The vectors of a name, as a gate gives it.

        Raises:
            SteeringValidationError: there are none of this kind.

        """
        with self._lock:
            found = self._vectors[kind].get(name) if isinstance(name, str) else None
            if found is None:
                raise fail(
                    f"{where}: no {kind} vector is named {shown(name)}; there are "
                    f"{listed(list(self._vectors[kind]))}. Add one by POST "
                    "/v1/steering/vectors/register",
                    where,
                    name,
                )
            return found

    def kept(self, conversation: str) -> list[dict[str, Any]]:
        """The gates that a conversation has kept, as its requests wrote them."""
        with self._lock:
            gates = self._conversations.pop(conversation, None)
            if gates is None:
                return []
            self._conversations[conversation] = gates
            return list(gates)

    def keep(self, conversation: str, gates: Sequence[Gate]) -> None:
        """Remember gates that act in later requests of a conversation."""
        staying = [gate.raw for gate in gates if gate.stays]
        if not staying:
            return
        with self._lock:
            before = self._conversations.pop(conversation, [])
            new = [raw for raw in staying if raw not in before]
            self._conversations[conversation] = before + new
            while len(self._conversations) > MAX_CONVERSATIONS:
                self._conversations.pop(next(iter(self._conversations)))

    def _check_kind(self, kind: Any) -> None:
        if kind not in KINDS:
            raise fail(f"kind must be one of {list(KINDS)}", "kind", kind)
