# SPDX-License-Identifier: Apache-2.0
"""Names that requests give their captures: two under way must not share one."""

import threading
import weakref
from collections.abc import Mapping
from typing import Any, TypeAlias

from vllm.v1.capture.elsewhere import NobodyElse
from vllm.v1.capture.selectors import fail

Claim: TypeAlias = tuple[str, str, str]
"""`(instance, tag, request id)`, as the client has written them."""


class Claims:
    """Which names are taken, and by which request. Any thread may call.

    A name is free again once the request's results are there; what happens to files
    that exist by then is the consumer's `on_collision`.
    """

    def __init__(
        self, consumers: Mapping[str, Any], elsewhere: NobodyElse | None = None
    ) -> None:
        """No name is taken.

        Args:
            consumers: by instance name.
            elsewhere: the names of other API server processes.

        """
        self._claiming = {
            name
            for name, consumer in consumers.items()
            if getattr(consumer, "claims_request_id", False)
        }
        self._elsewhere = elsewhere or NobodyElse()
        self._taken: dict[Claim, str] = {}
        self._reserved: dict[Claim, set[int]] = {}
        """For plans of requests that were admitted and are not under way yet."""
        # Plans may be collected, and so give up names, while this thread is here.
        self._lock = threading.RLock()

    def reserve(self, capture: Mapping[str, Any] | None, plan: object) -> None:
        """Keep a request's names until `take`, or until its plan is dropped with it.

        Raises:
            CaptureValidationError: a name is taken; the last of the two requests
                would overwrite the first.

        """
        claims = self._claims_of(capture)
        if not claims:
            return
        with self._lock:
            for claim in claims:
                if claim in self._taken or not self._elsewhere.take(claim):
                    self._drop(id(plan))
                    raise _refusal(claim)
                self._reserved.setdefault(claim, set()).add(id(plan))
        dropped = weakref.finalize(plan, self._drop, id(plan))
        dropped.atexit = False

    def take(self, capture: Mapping[str, Any] | None, owner: str, plan: object) -> None:
        """The names belong to the request `owner` from now on."""
        with self._lock:
            for claim in self._claims_of(capture):
                self._taken[claim] = owner
            self._drop(id(plan))

    def release(self, owner: str) -> None:
        """The results of `owner` are there."""
        with self._lock:
            for claim in list(self._taken):
                if self._taken[claim] == owner:
                    del self._taken[claim]
                    self._free(claim)

    def _drop(self, plan: int) -> None:
        """A plan reserves nothing any more."""
        with self._lock:
            for claim in list(self._reserved):
                plans = self._reserved.get(claim, set())
                if plan in plans:
                    plans.discard(plan)
                    if not plans:
                        del self._reserved[claim]
                    self._free(claim)

    def _free(self, claim: Claim) -> None:
        if claim not in self._taken and claim not in self._reserved:
            self._elsewhere.free(claim)

    def _claims_of(self, capture: Mapping[str, Any] | None) -> list[Claim]:
        return [
            (name, str(spec.get("tag") or ""), str(spec["request_id"]))
            for name, spec in (capture or {}).items()
            if name in self._claiming
            and isinstance(spec, Mapping)
            and spec.get("request_id") is not None
        ]


def _refusal(claim: Claim) -> Exception:
    instance, _, request_id = claim
    return fail(
        f"capture.{instance}.request_id: a request that is under way has the "
        f"request_id {request_id!r}, too; wait for it, use another one, or leave it "
        "out",
        f"capture.{instance}.request_id",
        request_id,
    )
