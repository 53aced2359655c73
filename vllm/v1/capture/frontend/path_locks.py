# SPDX-License-Identifier: Apache-2.0
"""Places that requests' rows are written to: two requests in flight share none.

API server processes share nothing but their machine and the process that started them.
Between them a place is a byte of one file, which its process has locked: the system
frees what a process leaves behind.
"""

import fcntl
import hashlib
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

from msgspec.structs import replace

from vllm import envs
from vllm.v1.capture.capabilities import ConsumerCapabilities
from vllm.v1.capture.plan import CapturePlan
from vllm.v1.capture.selectors import fail

Claim: TypeAlias = tuple[str, str]
"""`(instance, place)`, a place being what the consumer makes of a request's names."""


class NoOtherServers:
    """There is one process only: no name is taken elsewhere."""

    def take(self, name: tuple[str, ...]) -> bool:
        """Take a name, if no other process has it."""
        return True

    def free(self, name: tuple[str, ...]) -> None:
        """Others may have the name."""


class OtherServers(NoOtherServers):
    """The names that several processes take from each other; any thread may call.

    Within a process a name can be taken again: that is not noticed here.
    """

    def __init__(self, server: int) -> None:
        """Take nothing.

        Args:
            server: the id of the process that has started them all.

        """
        self._server = server
        path = Path(envs.VLLM_RPC_BASE_PATH, f"vllm-capture-names-{os.getuid()}")
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o600)

    def take(self, name: tuple[str, ...]) -> bool:
        """Take a name, if no other process has it."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._place(name))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def free(self, name: tuple[str, ...]) -> None:
        """Others may have the name."""
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._place(name))

    def _place(self, name: tuple[str, ...]) -> int:
        """A byte that no other name has, so far as 62 bits can tell."""
        digest = hashlib.sha256(repr((self._server, name)).encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 2


class PathLocks:
    """Which places are taken, and by which request. Any thread may call.

    A place is free again once the request's results are there; what happens to files
    that exist by then is the consumer's `on_collision`.
    """

    def __init__(
        self,
        consumers: Mapping[str, ConsumerCapabilities],
        elsewhere: NoOtherServers | None = None,
    ) -> None:
        """No place is taken.

        Args:
            consumers: by instance name. `places_of` gets an empty spec where an
                instance captures every request and this one does not name it.
            elsewhere: what other API server processes have taken.

        """
        self._claiming = {
            name: can.places_of
            for name, can in consumers.items()
            if can.places_of is not None
        }
        self._elsewhere = elsewhere or NoOtherServers()
        self._taken: dict[Claim, str] = {}
        self._reserved: dict[Claim, int] = {}
        """For plans of requests that were admitted and are not under way yet."""
        # Plans may be collected, and so give up names, while this thread is here.
        self._lock = threading.RLock()

    def reserve(
        self, capture: Mapping[str, Any] | None, plan: CapturePlan
    ) -> CapturePlan:
        """Keep a request's places until `take`, or until its plan is dropped with it.

        Who asked for nothing knows of no capture: if another request under way has the
        same id, a plan is returned that names this one `ID-2`, or `ID-3`.

        Raises:
            CaptureValidationError: a place is taken; the last of the two requests
                would overwrite the first.

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
        dropped = weakref.finalize(plan, self._drop, id(plan))
        dropped.atexit = False
        return plan

    def _reserve(self, claims: Sequence[Claim], plan: int) -> Claim | None:
        """Reserve all for a plan; if one is taken, none, and that one is returned."""
        with self._lock:
            for claim in claims:
                other = self._reserved.get(claim, plan) != plan
                if other or claim in self._taken or not self._elsewhere.take(claim):
                    self._drop(plan)
                    return claim
                self._reserved[claim] = plan
        return None

    def take(
        self, capture: Mapping[str, Any] | None, owner: str, plan: CapturePlan
    ) -> None:
        """The places belong to the request `owner` from now on."""
        with self._lock:
            for claim in self._claims_of(capture, plan):
                self._taken[claim] = owner
            self._drop(id(plan))

    def release(self, owner: str) -> None:
        """The results of `owner` are there."""
        with self._lock:
            for claim in list(self._taken):
                if self._taken[claim] == owner:
                    del self._taken[claim]
                    self._free(claim)

    def drop(self, plan: CapturePlan) -> None:
        """The request was refused: its plan reserves nothing."""
        self._drop(id(plan))

    def _drop(self, plan: int) -> None:
        """A plan reserves nothing any more."""
        with self._lock:
            for claim in [c for c, holder in self._reserved.items() if holder == plan]:
                del self._reserved[claim]
                self._free(claim)

    def _free(self, claim: Claim) -> None:
        if claim not in self._taken and claim not in self._reserved:
            self._elsewhere.free(claim)

    def _claims_of(
        self, capture: Mapping[str, Any] | None, plan: CapturePlan
    ) -> list[Claim]:
        """Of what the request asks for, and of what is captured of every request."""
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
        f"capture.{instance}.request_id: a request that is under way writes to "
        f"{place!r}, too; wait for it, or use another request_id",
        f"capture.{instance}.request_id",
        place.rpartition("/")[2],
    )


def other_servers(count: int) -> NoOtherServers:
    """What there is besides this process, of so many API servers."""
    return OtherServers(os.getppid()) if count > 1 else NoOtherServers()
