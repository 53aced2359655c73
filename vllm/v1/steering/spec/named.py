# SPDX-License-Identifier: Apache-2.0
"""Interfaces to the server's probes and sparse autoencoders, which entries name."""

from dataclasses import dataclass
from typing import Protocol

from vllm.v1.residual.tap import Tap
from vllm.v1.steering.errors import fail
from vllm.v1.steering.plan import Vector


@dataclass(frozen=True, slots=True, eq=False)
class NamedProbe:
    """A probe whose rows conditions may use."""

    vectors: Vector  # [k, hidden_size]
    bias: Vector  # [k]
    activation: str
    cosine: bool
    tap: Tap | None
    """The `(layer, hook)` for which it was made, if it is known."""


@dataclass(frozen=True, slots=True)
class NamedSAE:
    """The facts about an SAE that parsing needs; the workers hold its weights."""

    fingerprint: str
    """Fingerprint of the weights."""
    width: int
    size: int
    """Number of features."""
    tap: Tap | None
    """The `(layer, hook)` at which it was trained, if it is known."""
    is_transcoder: bool
    writes: Tap | None
    """The `(layer, hook)` at which it writes, if it is known."""
    width_out: int
    """Width of the rows that it writes."""


class Named(Protocol):
    """The probes and SAEs of a server, by name."""

    def probe(self, name: str, at: str) -> NamedProbe:
        """The probe of a name.

        Args:
            name: the probe's name.
            at: the parameter's name in messages.

        Raises:
            SteeringValidationError: there is none of this name.

        """
        ...

    def sae(self, name: str, at: str) -> NamedSAE:
        """The SAE of a name; arguments and errors are those of `probe`."""
        ...


class NoneNamed:
    """The null object of a server without probes and SAEs."""

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
