# SPDX-License-Identifier: Apache-2.0
"""Sends each vector from a front end to an engine once, not with each request.

A configuration of all hook points takes megabytes, and hundreds of requests may name
one. Both ends of a connection remember what was sent, by the same rule and in the same
order, so that each knows what the other holds: vectors that the engine still holds are
sent as their digest.
"""

from collections import OrderedDict, defaultdict
from copy import copy
from typing import TYPE_CHECKING, Any

from msgspec import structs

from vllm.v1.steering.plan import PackedVectors, SteeringTiers, tiers_of, with_tiers

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest

SMALLEST = 4 << 10
"""Vectors of fewer bytes than this are sent each time."""
MOST_REMEMBERED = 128 << 20
"""Bytes of vectors that an engine remembers for each front end."""
NO_DATA = memoryview(b"")


class Passed:
    """The vectors sent over one connection, least recently used first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: OrderedDict[str, PackedVectors] = OrderedDict()
        self._num_bytes = 0

    def __contains__(self, packed: PackedVectors) -> bool:
        return packed.digest in self._known

    def find(self, packed: PackedVectors) -> PackedVectors:
        """The full vectors for a digest that was sent."""
        known = self._known[packed.digest]
        return structs.replace(packed, data=known.data)

    def note(self, tiers: SteeringTiers) -> None:
        """Record that vectors are sent, in their order, in full or as digests."""
        for packed in filter(None, tiers.parts):
            size = len(packed.data)
            if not SMALLEST <= size <= self._most:
                continue
            if self._known.pop(packed.digest, None) is None:
                self._num_bytes += size
            self._known[packed.digest] = packed
            while self._num_bytes > self._most:
                _, oldest = self._known.popitem(last=False)
                self._num_bytes -= len(oldest.data)


class SentVectors:
    """The sender's side: what each engine holds.

    Engines that are replaced under one name are refused with steering, because their
    content would be unknown.
    """

    def __init__(self, most: int = MOST_REMEMBERED) -> None:
        self._passed: defaultdict[Any, Passed] = defaultdict(lambda: Passed(most))

    def encoded(self, request: Any, encoder: Any, engine: Any) -> Any:
        """Encode a message that will certainly be sent to an engine, in short form.

        Vectors that the engine holds are replaced by digests.

        Args:
            request: the message, of any kind; it is not changed.
            encoder: upstream's encoder of messages.
            engine: identifies the engine.

        """
        is_request = hasattr(request, "sampling_params")
        tiers = tiers_of(request) if is_request else None
        if tiers is None:
            return encoder.encode(request)
        passed = self._passed[engine]
        short = tiers.changed(
            lambda p: structs.replace(p, data=NO_DATA) if p in passed else p
        )
        sent = copy(request)  # The front end still uses the request.
        sent.sampling_params = with_tiers(request.sampling_params, short)
        frames = encoder.encode(sent)
        passed.note(tiers)
        return frames


class ReceivedVectors:
    """The receiver's side: what each front end has sent. Input thread only."""

    def __init__(self, most: int = MOST_REMEMBERED) -> None:
        self._passed: defaultdict[int, Passed] = defaultdict(lambda: Passed(most))

    def complete(self, request: "EngineCoreRequest") -> None:
        """Restore the vectors that a request names by digest.

        Must be called for every request with steering, in the order of sending.
        """
        tiers = tiers_of(request)
        if tiers is None:
            return
        passed = self._passed[request.client_index]
        tiers = tiers.changed(
            lambda p: passed.find(p) if p.taps and not p.data.nbytes else p
        )
        passed.note(tiers)
        assert request.sampling_params is not None
        request.sampling_params._steering = tiers
