# SPDX-License-Identifier: Apache-2.0
"""What entries refer to by name: probes and sparse autoencoders of the server."""

from dataclasses import dataclass
from typing import Protocol

from vllm.v1.steering.errors import fail
from vllm.v1.steering.plan import Tap, Vector


@dataclass(frozen=True, slots=True, eq=False)
class NamedProbe:
    """Directions that a condition may compare."""

    vectors: Vector  # [k, hidden_size]
    bias: Vector  # [k]
    activation: str
    cosine: bool
    tap: Tap | None
    """The place that it was made for, if it says one."""


class Named(Protocol):
    """The probes and SAEs of a server, by name."""

    def probe(self, name: str, at: str) -> NamedProbe:
        """A probe.

        Args:
            name: of it.
            at: the parameter's name in messages.

        Raises:
            SteeringValidationError: there is none of this name.

        """
        ...


class NoneNamed:
    """A server without any."""

    def probe(self, name: str, at: str) -> NamedProbe:
        """Refuse."""
        raise fail(
            f"{at}: no probe is named {name!r} here; register one with "
            "--readout-modules, or give its vector",
            at,
            name,
        )


NONE_NAMED = NoneNamed()
