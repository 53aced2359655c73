# SPDX-License-Identifier: Apache-2.0
"""Resolved vectors and operations, as sent to the engine core and the workers.

They are created once, at admission; user input is not interpreted after that.
`docs/steering/semantics.md` has the formulas of the operations. This module does not
import torch, because `vllm.sampling_params` imports it.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from itertools import chain
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import structs

from vllm.v1.residual.spans import Spans, selected
from vllm.v1.residual.tap import Tap
from vllm.v1.steering.conditions import Condition
from vllm.v1.steering.features import FeatureUse

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.request import Request


OpName: TypeAlias = Literal[
    "replace", "add", "project_out", "swap", "rotate", "low_rank", "feature", "clamp"
]

OP_NAMES: tuple[OpName, ...] = (
    "replace",
    "add",
    "project_out",
    "swap",
    "rotate",
    "low_rank",
    "feature",
    "clamp",
)
"""All operations, in the order in which one hook point applies them."""


class Details(msgspec.Struct, frozen=True, array_like=True):
    """The fields that only some operations use."""

    strength: float = 1.0
    """`clamp`: the fraction of the distance to the bounds that is moved, 1 for all."""
    alpha: float = 1.0
    """`replace`: the weight of the vector in the result, 1 for all."""
    degrees: float = 0.0
    """`rotate`: the angle."""
    activation: str = "identity"
    """`low_rank`: the function applied to what is read."""
    arrays: tuple[tuple[str, bytes], ...] = ()
    """Further arrays as float32 bytes, by name: `target`, `mask`, `write`, `bias`,
    `threshold`."""
    when: Condition | None = None
    """If set, the operation acts only where this condition fires."""
    feature: FeatureUse | None = None
    """`feature`: the feature and its change; this operation has no vector of its
    own."""

    def array(self, name: str) -> npt.NDArray[np.float32] | None:
        """The named array, flat float32; None if there is none of this name."""
        data = dict(self.arrays).get(name)
        return None if data is None else np.frombuffer(data, dtype=np.float32)


NO_DETAILS = Details()


class Operation(msgspec.Struct, frozen=True, array_like=True):
    """One operation at one hook point of one layer."""

    layer: int
    hook: str
    op: OpName
    data: bytes
    """The vector as given: float32 `[hidden_size]`; `[2, hidden_size]` for the plane of
    `rotate`, `[rank, hidden_size]` for the rows that `low_rank` reads."""
    scale: float
    low: float | None
    high: float | None
    norm_match: bool
    """Whether `scale` is a multiple of the stream's norm at the token."""
    positions: Spans | None
    """Token positions; negative ones count from the prompt's end. None: every token."""
    content: str
    """SHA-256 of everything but the place and the positions."""
    details: Details = NO_DETAILS
    num_rows: int = 0
    """Number of rows in `data`, in the order of the positions, if each position has a
    vector of its own. 0: one vector for all positions."""

    @property
    def digest(self) -> str:
        """Equal, in every process, for operations that differ in positions only."""
        return f"{self.content}@{self.layer}.{self.hook}"

    @property
    def num_bytes(self) -> int:
        """Bytes of the operation's vectors, in float32."""
        return len(self.data) + sum(len(data) for _, data in self.details.arrays)

    @property
    def tap(self) -> tuple[int, str]:
        """The `(layer, hook)` at which the operation acts."""
        return self.layer, self.hook

    @property
    def vector(self) -> npt.NDArray[np.float32]:
        """The vector `[hidden_size]`, or all rows flat; a float32 view of `data`."""
        return np.frombuffer(self.data, dtype=np.float32)

    def selected(self, num_prompt: int, start: int, stop: int) -> list[int]:
        """The positions in `[start, stop)` on which it acts, ascending."""
        if self.positions is None:
            return list(range(start, stop))
        return selected(self.positions, num_prompt, start, stop)


def operation(
    tap: tuple[int, str],
    op: OpName,
    vector: npt.NDArray[np.float32],
    scale: float,
    bounds: tuple[float | None, float | None],
    norm_match: bool,
    positions: Spans | None,
    details: Details = NO_DETAILS,
    num_rows: int = 0,
) -> Operation:
    """Create an operation and compute the digest of its content."""
    data = vector.astype("<f4", copy=False).tobytes()
    made = Operation(
        *tap, op, data, scale, *bounds, norm_match, positions, "", details, num_rows
    )
    return hashed(made)


def hashed(one: Operation) -> Operation:
    """The operation with the digest of its content."""
    # Encoded, because the text of an array's bytes takes longer than all the rest.
    what = one.op, one.scale, one.low, one.high, one.norm_match, one.details
    content = hashlib.sha256(msgspec.msgpack.encode((*what, one.num_rows)))
    content.update(one.data)
    return structs.replace(one, content=content.hexdigest())


def on_prompt(one: Operation) -> Operation:
    """The operation, with its condition (of scope `rest`) decided in the prompt too."""
    when = one.details.when
    assert when is not None, "the operation has no condition"
    when = structs.replace(when, in_prompt=True)
    return hashed(structs.replace(one, details=structs.replace(one.details, when=when)))


def place_of(one: Operation) -> int:
    """The operation's rank in the order in which one hook point applies kinds."""
    return OP_NAMES.index(one.op)


def in_order(operations: Iterable[Operation]) -> tuple[Operation, ...]:
    """Operations in the order in which one hook point applies them.

    Operations of one kind keep their order: engine before request, base before phase,
    then as written.
    """
    return tuple(sorted(operations, key=place_of))


Vector: TypeAlias = npt.NDArray[np.float32]
Vectors: TypeAlias = Mapping[Tap, Vector]
"""One vector `[hidden_size]`, float32, per tap."""


class PackedVectors(msgspec.Struct, frozen=True, array_like=True):
    """One tier: packed vectors, already scaled, and further operations."""

    taps: tuple[Tap, ...]
    """The taps of the vectors, sorted."""
    data: memoryview
    """The vectors, float32 `[len(taps), hidden_size]`, row-major; a view, so that the
    receiver of a message copies nothing."""
    digest: str
    """SHA-256 of taps and data, equal in every process; empty without vectors."""
    operations: tuple[Operation, ...] = ()
    """The operations, in the order in which they were written."""

    def __deepcopy__(self, memo: Any) -> "PackedVectors":
        return self  # The object is immutable.

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        data = PickleBuffer(self.data) if int(protocol) >= 5 else bytes(self.data)
        return _unpickled, (self.taps, data, self.digest, self.operations)

    @property
    def identity(self) -> str:
        """A digest of vectors and operations, equal for tiers with equal effect."""
        parts = [f"{one.digest}{one.positions}" for one in self.operations]
        return "|".join([self.digest, *parts])

    def unpack(self) -> dict[Tap, Vector]:
        """The vectors by tap, as float32 views of the data."""
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
    """Pack vectors and operations of a tier; None if nothing is left.

    A vector of zeros changes nothing, so it is left out; the scheduler and the prefix
    cache then treat the request as unsteered. With `keep_zeros` it is kept, because it
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
    """The digest of a sum of tiers; empty if all are empty."""
    digests = [part.digest for part in parts if part is not None and part.digest]
    if len(digests) <= 1:
        return "".join(digests)
    return hashlib.sha256(" ".join(sorted(digests)).encode()).hexdigest()


def total(parts: Sequence[PackedVectors | None]) -> dict[Tap, Vector]:
    """The sum of the vectors of several tiers, by tap."""
    sums: dict[Tap, Vector] = {}
    for part in parts:
        for tap, vector in part.unpack().items() if part is not None else ():
            with np.errstate(over="ignore"):  # Admission refuses sums that overflow.
                sums[tap] = sums[tap] + vector if tap in sums else vector
    return sums


class SteeringTiers(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """Base, prefill and decode vectors of one request or of the engine.

    Prompt tokens are steered by base + prefill, generated tokens by base + decode.
    """

    base: PackedVectors | None = None
    prefill: PackedVectors | None = None
    decode: PackedVectors | None = None
    receipt: bool = False
    """Whether the doses of the request's tokens are measured."""

    @property
    def parts(self) -> tuple[PackedVectors | None, ...]:
        """Base, prefill and decode."""
        return self.base, self.prefill, self.decode

    @property
    def taps(self) -> frozenset[Tap]:
        """The `(layer, hook)` at which the stream is changed."""
        added = (part.taps for part in self.parts if part is not None)
        return frozenset(chain(*added)).union(one.tap for one in self.operations)

    @property
    def operations(self) -> tuple[Operation, ...]:
        """The operations of all tiers."""
        return operations_of(*self.parts)

    def changed(
        self, change: Callable[[PackedVectors], PackedVectors | None]
    ) -> "SteeringTiers":
        """The configuration with a change made to each tier that it has."""
        base, prefill, decode = (part and change(part) for part in self.parts)
        return SteeringTiers(base, prefill, decode, self.receipt)

    def joined(
        self,
        other: "SteeringTiers",
        join: Callable[
            [PackedVectors | None, PackedVectors | None], PackedVectors | None
        ],
    ) -> "SteeringTiers":
        """Each tier joined with the other configuration's."""
        base, prefill, decode = map(join, self.parts, other.parts)
        return SteeringTiers(base, prefill, decode)

    @cached_property
    def prefill_digest(self) -> str:
        """The digest of the vectors for prompt tokens; empty if there are none."""
        return digest_of(self.base, self.prefill)

    @cached_property
    def decode_digest(self) -> str:
        """The digest of the vectors for generated tokens; empty if there are none."""
        return digest_of(self.base, self.decode)

    @cached_property
    def digest(self) -> str:
        """The digest of the configuration; requests with equal ones share rows."""
        named = "/".join("" if part is None else part.identity for part in self.parts)
        named += "/receipt" if self.receipt else ""
        return hashlib.sha256(named.encode()).hexdigest()

    @cached_property
    def prefill_operations(self) -> tuple[Operation, ...]:
        """The operations on prompt tokens."""
        return operations_of(self.base, self.prefill)

    @cached_property
    def decode_operations(self) -> tuple[Operation, ...]:
        """The operations on generated tokens."""
        return operations_of(self.base, self.decode)

    @cached_property
    def bank_bytes(self) -> int:
        """Bytes of the operations' vectors on a device that holds all layers."""
        return sum(one.num_bytes for one in self.operations)

    @cached_property
    def groups(self) -> tuple[tuple["Group", ...], ...]:
        """The operations of each tier, grouped by equal positions."""
        return tuple(tuple(_groups(operations_of(part))) for part in self.parts)

    @cached_property
    def conditions(self) -> tuple[Condition, ...]:
        """The distinct conditions of all operations, in their order."""
        found = dict.fromkeys(one.details.when for one in self.operations)
        return tuple(when for when in found if when is not None)

    @cached_property
    def carried(self) -> tuple[str, ...]:
        """The digests of operations with transcoders' activations, in their order."""
        uses = ((one.digest, one.details.feature) for one in self.operations)
        return tuple({digest: None for digest, use in uses if use and use.carries})

    def __bool__(self) -> bool:
        return any(self.parts)


class Group(NamedTuple):
    """Operations of one tier that act at the same positions."""

    digest: str
    """A digest that is equal for groups with equal effect."""
    first: Operation
    """The first operation; the others have the same positions."""
    by_position: bool
    """Whether each position has a vector of its own."""

    def name(self, num_prompt: int) -> str:
        """The group's name in the hash of a block, for a given length of the prompt."""
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
        if by_position:  # A token's row depends on all positions.
            parts.append(repr(positions))
        if len(parts) > 1:
            parts = [hashlib.sha256(" ".join(parts).encode()).hexdigest()]
        yield Group(parts[0], alike[0], by_position)


def operations_of(*parts: PackedVectors | None) -> tuple[Operation, ...]:
    """The operations of some tiers, in their order."""
    return tuple([one for part in parts if part for one in part.operations])


NO_STEERING = SteeringTiers()


def tiers_of(request: "Request | EngineCoreRequest") -> SteeringTiers | None:
    """The configuration that admission resolved for a request, if any."""
    params = request.sampling_params
    return params._steering if params is not None else None


def with_tiers(
    params: "SamplingParams", tiers: SteeringTiers | None
) -> "SamplingParams":
    """A copy of a request's parameters with another configuration, or with none."""
    other = copy(params)
    other._steering = tiers
    return other
