# SPDX-License-Identifier: Apache-2.0
"""Locks on output paths, so that no two requests in flight write to the same one.

Only one front end's requests are compared. Requests of several write one after another
where they have the same path, and the last one is read; see `sole_writer`.
"""

import threading
import weakref
from collections.abc import Hashable, Mapping, Sequence
from itertools import count
from typing import Any, TypeAlias

from msgspec.structs import replace

from vllm.v1.capture.capabilities import ConsumerCapabilities
from vllm.v1.capture.errors import fail
from vllm.v1.residual.capture_plan import CapturePlan

Claim: TypeAlias = tuple[str, str]
"""`(instance, path)`, with the path as `places_of` of the consumer returns it."""


class PathLocks:
    """The locked output paths and the requests that hold them; thread-safe.

    A path is unlocked once all results of its request have arrived. What a later
    request does with files that exist is decided by the consumer's `on_collision`.
    """

    def __init__(
        self,
        consumers: Mapping[str, ConsumerCapabilities],
    ) -> None:
        """Start with no path locked.

        Args:
            consumers: by instance name. `places_of` is called with an empty spec if an
                instance captures a request that does not name it.

        """
        self._claiming = {
            name: can.places_of
            for name, can in consumers.items()
            if can.places_of is not None
        }
        self._holders: dict[Claim, Hashable] = {}
        """The ids of requests, and of plans whose requests have not started yet."""
        # Reentrant: a plan may be garbage-collected on this thread while it holds the
        # lock, and its finalizer calls `release`.
        self._lock = threading.RLock()

    def reserve(
        self, capture: Mapping[str, Any] | None, plan: CapturePlan
    ) -> CapturePlan:
        """Reserve a request's paths until `take`, or until its plan is collected.

        A request that does not ask for a capture, but is captured by a global spec, is
        not refused if its paths are locked: it gets the id `ID-2`, `ID-3`, ... in the
        plan.

        Args:
            capture: the request's `SamplingParams.capture`.
            plan: its plan.

        Returns:
            The plan, perhaps with another `client_request_id`.

        Raises:
            CaptureValidationError: a request in flight writes to one of its paths.

        """
        given = plan.client_request_id
        for number in count(2):
            claims = self._claims_of(capture, plan)
            if not claims:
                return plan
            taken = self._reserve(claims, id(plan))
            if taken is None:
                break
            if capture:
                raise _refusal(taken)
            plan = replace(plan, client_request_id=f"{given}-{number}")
        dropped = weakref.finalize(plan, self.release, id(plan))
        dropped.atexit = False
        return plan

    def _reserve(self, claims: Sequence[Claim], plan: int) -> Claim | None:
        """Reserve all claims for a plan, or none; returns the one that is taken."""
        with self._lock:
            for claim in claims:
                if self._holders.setdefault(claim, plan) != plan:
                    self.release(plan)
                    return claim
        return None

    def take(
        self, capture: Mapping[str, Any] | None, owner: str, plan: CapturePlan
    ) -> None:
        """Pass the reserved paths to the request `owner`, which starts."""
        with self._lock:
            self._holders |= dict.fromkeys(self._claims_of(capture, plan), owner)

    def release(self, holder: Hashable) -> None:
        """Unlock the paths of a request whose results have arrived, or of a plan."""
        with self._lock:
            for claim in [c for c, one in self._holders.items() if one == holder]:
                del self._holders[claim]

    def _claims_of(
        self, capture: Mapping[str, Any] | None, plan: CapturePlan
    ) -> list[Claim]:
        """The paths of a request, for its own specs and for global ones."""
        if not self._claiming:
            return []
        asked = capture or {}
        return [
            (name, place)
            for name in dict.fromkeys((*asked, *plan.instances))
            if name in self._claiming
            for place in self._claiming[name](
                asked.get(name, {}), plan.client_request_id, plan.num_samples
            )
        ]


def _refusal(claim: Claim) -> Exception:
    instance, place = claim
    return fail(
        f"capture.{instance}.request_id: a request in flight writes to {place!r} too; "
        "wait for it, or use another request_id",
        f"capture.{instance}.request_id",
        place.rpartition("/")[2],
    )
