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


@dataclass(frozen=True, slots=True)
class NamedSAE:
    """What an entry must know of an SAE; the weights are the workers'."""

    fingerprint: str
    """Of its weights."""
    width: int
    size: int
    """Number of features."""
    selection: str
    """Which features are active, as `vllm.steering.sae` has it."""
    tap: Tap | None
    """The place that it was trained at, if it says one."""
    is_transcoder: bool


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

    def sae(self, name: str, at: str) -> NamedSAE:
        """An SAE; as `probe`."""
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

    def sae(self, name: str, at: str) -> NamedSAE:
        """Refuse."""
        raise fail(
            f"{at}: no SAE is named {name!r} here; name one with --sae NAME=PATH",
            at,
            name,
        )


NONE_NAMED = NoneNamed()
