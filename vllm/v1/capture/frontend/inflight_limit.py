# SPDX-License-Identifier: Apache-2.0
"""Limit on the bytes that requests in flight return to their front end.

Rows that are returned with the output, and results of readouts, stay in a server's
memory until the client has read them. The limit therefore applies to the sum over all
requests. Offline they are the caller's, and only a single request has a limit.
"""

import weakref
from collections.abc import Mapping

from vllm.v1.capture.capabilities import ConsumerCapabilities
from vllm.v1.capture.errors import CaptureValidationError, fail
from vllm.v1.capture.frontend.request_tracker import RequestTracker
from vllm.v1.residual.capture_plan import LIVE, CapturePlan
from vllm.v1.residual.spans import overlap

RESULTS = "*results"
"""Name under which results of readouts are counted, beside instances of consumers."""
KEEPING = "*keep_when"
"""Name under which rows are counted that wait until `keep_when` is decided."""
RESULT_BYTES = 1 << 30
"""Limit on results of readouts in a server."""


class InflightLimit:
    """Refuses a request whose rows would not fit with those of requests in flight."""

    def __init__(
        self,
        consumers: Mapping[str, ConsumerCapabilities],
        row_bytes: int,
        requests: RequestTracker,
    ) -> None:
        """Start with the limits of the consumers that return rows.

        Args:
            consumers: by instance name.
            row_bytes: bytes of a row of the stream.
            requests: the requests in flight.

        """
        self._row_bytes = row_bytes
        self._requests = requests
        self.limits: dict[str, int] = {
            name: can.max_inflight_bytes
            for name, can in consumers.items()
            if can.max_inflight_bytes is not None
        }

    def bytes_of(self, plan: CapturePlan, max_tokens: int | None) -> dict[str, int]:
        """The maximum bytes that a request returns, by instance that has a limit.

        Args:
            plan: of the request.
            max_tokens: how many tokens it may generate.

        """
        stop = plan.num_prompt_tokens + max((max_tokens or 1) - 1, 0)
        sizes: dict[str, int] = {}
        for group in plan.groups:
            for reader in group.readers:
                names = {reader.instance} & self.limits.keys()
                if reader.instance in plan.keeping and KEEPING in self.limits:
                    names.add(KEEPING)
                for name in names:
                    rows = sum(b - a for a, b in overlap(reader.ranges, 0, stop))
                    taps = len(group.taps) * group.each
                    size = rows * taps * self._row_bytes * plan.num_samples
                    sizes[name] = sizes.get(name, 0) + size
        if LIVE in plan.lanes:
            # Rows of intermediate outputs are held in addition to the result.
            sizes = {name: 2 * size for name, size in sizes.items()}
        readouts = plan.readouts
        if RESULTS in self.limits and readouts is not None and readouts.result_bytes:
            sizes[RESULTS] = readouts.result_bytes
        return sizes

    def reserve(self, plan: CapturePlan, max_tokens: int | None) -> None:
        """Reserve room for the rows of an admitted request.

        Args:
            plan: the request's plan.
            max_tokens: how many tokens it may generate.

        Raises:
            CaptureValidationError: the rows never fit, or not now.

        """
        needed = self.bytes_of(plan, max_tokens)
        if not needed:
            return
        with self._requests.lock:
            for name, size in needed.items():
                self._check(name, size, LIVE in plan.lanes)
            self._requests.held.put(id(plan), "reserved", needed)
        dropped = weakref.finalize(plan, self._requests.held.drop, id(plan))
        dropped.atexit = False

    def take(self, plan: CapturePlan, max_tokens: int | None) -> dict[str, int]:
        """End the reservation of a request that starts; returns its bytes."""
        sizes = self.bytes_of(plan, max_tokens)
        if sizes:
            self._requests.held.drop(id(plan))
        return sizes

    def _check(self, name: str, size: int, live: bool) -> None:
        limit = self.limits[name]
        held = self._requests.held.of(name, "reserved", "running", "unsent")
        left = self._requests.held.of(name, "aborted")
        self._requests.forget_aborted(name, left + held + size - limit)
        if name == RESULTS and held + size > limit:
            raise CaptureValidationError(
                f"readouts: the results of this request may take {size} bytes, and "
                f"those of requests in flight {held}, unread responses included; "
                f"together at most {limit} are allowed. Send it again when others have "
                "finished, or read fewer positions, layers or values",
                parameter="readouts",
                value=size,
            )
        if name == KEEPING and held + size > limit:
            raise CaptureValidationError(
                f"keep_when: up to {size} bytes of this request's rows wait for its "
                f"end, and {held} of requests in flight; together at most {limit} are "
                "allowed. Send it again when others have finished, capture less, lower "
                "max_tokens, or start with a larger --capture-host-memory-bytes",
                parameter="capture",
                value=size,
            )
        if size > limit:
            twice = ", twice what it returns, because its outputs have rows before the "
            twice += "last one (capture_stream=False disables that)"
            raise fail(
                f"capture.{name}: this request alone may hold {size} bytes of rows"
                f"{twice if live else ''}; at most {limit} are allowed "
                "(max_inflight_bytes). Capture fewer layers or positions, lower "
                f"max_tokens, or start with --capture-consumers {name}:"
                f"max_inflight_bytes={2 * size}",
                f"capture.{name}",
                size,
            )
        if held + size > limit:
            raise CaptureValidationError(
                f"capture.{name}: this request may hold {size} bytes of rows, and "
                f"those in flight may hold {held}, unread responses included; together "
                f"at most {limit} are allowed (max_inflight_bytes). Send it again when "
                "others have finished, capture less, or start with a larger "
                f"--capture-consumers {name}:max_inflight_bytes=...",
                parameter=f"capture.{name}",
                value=size,
            )
