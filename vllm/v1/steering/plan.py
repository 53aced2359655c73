# SPDX-License-Identifier: Apache-2.0
"""Steering vectors, resolved: the form that travels to the engine core and workers.

Made once, at admission; nothing after it interprets a user's input again. This
module imports neither torch nor the rest of steering, because
`vllm.sampling_params` imports it.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from vllm.v1.steering.conditions import Condition, distinct
from vllm.v1.steering.operations import Operation
from vllm.v1.steering.positions import Spans

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.request import Request

Tap: TypeAlias = tuple[int, str]
"""`(layer, hook)`: a place where vectors are added."""

Vector: TypeAlias = npt.NDArray[np.float32]
Vectors: TypeAlias = Mapping[Tap, Vector]
"""One vector `[hidden_size]` per tap."""


class PackedVectors(msgspec.Struct, frozen=True, array_like=True):
    """One tier: vectors, scaled and packed, and what is done beyond adding them."""

    taps: tuple[Tap, ...]
    """Sorted."""
    data: memoryview
    """float32 `[len(taps), hidden_size]`, row-major; a view, so that who receives a
    message copies nothing."""
    digest: str
    """SHA-256 of the other two, the same in every process; empty without vectors."""
    operations: tuple[Operation, ...] = ()
    """In the order in which they were written."""

    def __deepcopy__(self, memo: Any) -> "PackedVectors":
        return self  # Nobody changes it.

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        data = PickleBuffer(self.data) if int(protocol) >= 5 else bytes(self.data)
        return _unpickled, (self.taps, data, self.digest, self.operations)

    @property
    def identity(self) -> str:
        """Equal for tiers that do the same."""
        parts = [f"{one.digest}{one.positions}" for one in self.operations]
        return "|".join([self.digest, *parts])

    def unpack(self) -> dict[Tap, Vector]:
        """The vectors by tap, as views of the data."""
        if not self.taps:
            return {}
        rows = np.frombuffer(self.data, dtype=np.float32)
        return dict(zip(self.taps, rows.reshape(len(self.taps), -1), strict=True))


def _unpickled(
    taps: tuple[Tap, ...], data: Any, digest: str, operations: tuple[Operation, ...]
) -> PackedVectors:
    return PackedVectors(taps, memoryview(data), digest, operations)


def pack(
    vectors: Vectors,
    operations: Sequence[Operation] = (),
    keep_zeros: bool = False,
) -> PackedVectors | None:
    """The packed form of `vectors`, None where nothing is left.

    A vector of zeros changes nothing, so it is left out: steering by it is not
    steering, for the scheduler and the prefix cache too. It is kept where it
    shall replace another vector.
    """
    taps = tuple(sorted(tap for tap, v in vectors.items() if keep_zeros or v.any()))
    if not taps:
        empty = memoryview(b"")
        return PackedVectors((), empty, "", tuple(operations)) if operations else None
    # Adding 0.0 turns -0.0 into 0.0: equal vectors get equal bytes.
    rows = np.stack([vectors[tap] for tap in taps]).astype("<f4", copy=False) + 0.0
    data = rows.astype("<f4", copy=False).tobytes()
    digest = hashlib.sha256(repr((taps, rows.shape[1])).encode())
    digest.update(data)
    return PackedVectors(taps, memoryview(data), digest.hexdigest(), tuple(operations))


def digest_of(*parts: PackedVectors | None) -> str:
    """The digest of a sum; empty where there is nothing to add."""
    digests = [part.digest for part in parts if part is not None and part.digest]
    if len(digests) <= 1:
        return "".join(digests)
    return hashlib.sha256(" ".join(sorted(digests)).encode()).hexdigest()


def total(parts: Sequence[PackedVectors | None]) -> dict[Tap, Vector]:
    """The sum of several sets of vectors."""
    sums: dict[Tap, Vector] = {}
    for part in parts:
        for tap, vector in part.unpack().items() if part is not None else ():
            with np.errstate(over="ignore"):  # Admission refuses what overflows.
                sums[tap] = sums[tap] + vector if tap in sums else vector
    return sums


class SteeringTiers(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """Base, prefill and decode vectors, of one request or of the whole engine.

    A prompt token is steered by base + prefill, a generated one by base + decode.
    """

    base: PackedVectors | None = None
    prefill: PackedVectors | None = None
    decode: PackedVectors | None = None

    @property
    def parts(self) -> tuple[PackedVectors | None, ...]:
        """The three, in this order."""
        return self.base, self.prefill, self.decode

    @cached_property
    def prefill_digest(self) -> str:
        """What prompt tokens are steered by; empty if by nothing."""
        return digest_of(self.base, self.prefill)

    @cached_property
    def decode_digest(self) -> str:
        """What generated tokens are steered by; empty if by nothing."""
        return digest_of(self.base, self.decode)

    @cached_property
    def digest(self) -> str:
        """Names the configuration: requests with equal ones share rows."""
        named = "/".join("" if part is None else part.identity for part in self.parts)
        return hashlib.sha256(named.encode()).hexdigest()

    @cached_property
    def prefill_operations(self) -> tuple[Operation, ...]:
        """What is done at prompt tokens beyond adding vectors."""
        return _operations(self.base) + _operations(self.prefill)

    @cached_property
    def decode_operations(self) -> tuple[Operation, ...]:
        """What is done at generated tokens beyond adding vectors."""
        return _operations(self.base) + _operations(self.decode)

    @cached_property
    def bank_bytes(self) -> int:
        """What the vectors of operations take on a device that has all layers."""
        parts = (part.operations for part in self.parts if part is not None)
        return sum(one.num_bytes for operations in parts for one in operations)

    @cached_property
    def groups(self) -> tuple[tuple["Group", ...], ...]:
        """The operations of each tier that act at equal positions, together."""
        return tuple(tuple(_groups(_operations(part))) for part in self.parts)

    def __bool__(self) -> bool:
        return any(self.parts)


class Group(NamedTuple):
    """Operations of one tier that act at the same positions."""

    digest: str
    """Equal for groups that do the same."""
    first: Operation
    """Whose positions are those of all."""
    by_position: bool
    """Whether each position has a vector of its own."""

    def name(self, num_prompt: int) -> str:
        """What is done, for the hash of a block of a prompt of so many tokens."""
        spans = self.first.positions
        if self.by_position and spans and spans[0][0] < 0:
            return f"{self.digest}:{num_prompt}"
        return self.digest


def _groups(operations: Sequence[Operation]) -> Iterator[Group]:
    together: dict[Spans | None, list[Operation]] = {}
    for one in operations:
        together.setdefault(one.positions, []).append(one)
    for positions, alike in together.items():
        parts = [one.digest for one in alike]
        by_position = any(one.num_rows for one in alike)
        if by_position:  # Which row a token gets depends on where all of them are.
            parts.append(repr(positions))
        if len(parts) > 1:
            parts = [hashlib.sha256(" ".join(parts).encode()).hexdigest()]
        yield Group(parts[0], alike[0], by_position)


def _operations(packed: PackedVectors | None) -> tuple[Operation, ...]:
    return () if packed is None else packed.operations


NO_STEERING = SteeringTiers()


def conditions_of(tiers: SteeringTiers) -> tuple[Condition, ...]:
    """The different conditions of all operations, in their order."""
    operations = (one for part in tiers.parts for one in _operations(part))
    return distinct(one.details.when for one in operations)


def tiers_of(request: "Request | EngineCoreRequest") -> SteeringTiers | None:
    """The configuration that admission gave a request, if any."""
    params = request.sampling_params
    return params._steering if params is not None else None


def with_tiers(
    params: "SamplingParams", tiers: SteeringTiers | None
) -> "SamplingParams":
    """A copy of a request's parameters with another configuration, or none."""
    other = copy(params)
    other._steering = tiers
    return other
