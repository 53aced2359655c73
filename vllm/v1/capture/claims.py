# SPDX-License-Identifier: Apache-2.0
"""Names that requests give their captures: two under way must not share one."""

from collections.abc import Mapping
from typing import Any, TypeAlias

from vllm.v1.capture.selectors import fail

Claim: TypeAlias = tuple[str, str, str]
"""`(instance, tag, request id)`, as the client has written them."""


class Claims:
    """Which names are taken, and by which request.

    A name is free again once the request's results are there; what happens to files
    that exist by then is the consumer's `on_collision`.
    """

    def __init__(self, consumers: Mapping[str, Any]) -> None:
        self._claiming = {
            name
            for name, consumer in consumers.items()
            if getattr(consumer, "claims_request_id", False)
        }
        self._taken: dict[Claim, str] = {}

    def check(self, capture: Mapping[str, Any] | None) -> None:
        """Refuse a request whose names are taken.

        Raises:
            CaptureValidationError: the last of the two would overwrite the first.

        """
        for claim in self._claims_of(capture):
            if claim in self._taken:
                instance, _, request_id = claim
                raise fail(
                    f"capture.{instance}.request_id: a request that is under way has "
                    f"the request_id {request_id!r}, too; wait for it, use another "
                    "one, or leave it out",
                    f"capture.{instance}.request_id",
                    request_id,
                )

    def take(self, capture: Mapping[str, Any] | None, owner: str) -> None:
        """The names belong to the request `owner` from now on."""
        for claim in self._claims_of(capture):
            self._taken[claim] = owner

    def release(self, owner: str) -> None:
        """The results of `owner` are there."""
        for claim in [c for c, taker in self._taken.items() if taker == owner]:
            del self._taken[claim]

    def _claims_of(self, capture: Mapping[str, Any] | None) -> list[Claim]:
        return [
            (name, str(spec.get("tag") or ""), str(spec["request_id"]))
            for name, spec in (capture or {}).items()
            if name in self._claiming
            and isinstance(spec, Mapping)
            and spec.get("request_id") is not None
        ]
