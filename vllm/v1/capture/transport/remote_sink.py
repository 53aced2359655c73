# SPDX-License-Identifier: Apache-2.0
"""Sinks in a worker that forward rows to the front end's process."""

from collections.abc import Iterator, Sequence
from typing import Literal

from msgspec import structs

from vllm.v1.capture.groups import GroupChunk, GroupEnd, GroupSink
from vllm.v1.capture.transport.addresses import rows_address
from vllm.v1.capture.transport.zmq_channel import (
    ChunksMessage,
    EndMessage,
    Outbox,
)
from vllm.v1.capture.types import (
    CaptureFinalize,
    CaptureKey,
    CaptureResult,
)

MESSAGE_BYTES = 8 << 20


class ForwardingSink(GroupSink):
    """Forwards a driver-side consumer's chunks and request ends to the front ends.

    Each request's rows go to the front end that admitted it. All methods except `route`
    are called on the lane's thread.
    """

    location: Literal["worker", "driver"] = "driver"
    _bounded = True

    def __init__(
        self, instance: str, stage: int, outbox: Outbox, truncates: bool = False
    ) -> None:
        self.truncates = truncates
        self._instance = instance
        self._stage = stage
        self._outbox = outbox
        self._routes: dict[str, str] = {}
        self._ended: set[str] = set()

    def route(self, request_id: str, address: str) -> None:
        """Set the front end's address of a request, before its first row."""
        self._routes[request_id] = rows_address(address, self._instance)

    def submit_rows(self, items: Sequence[GroupChunk]) -> None:
        """Send rows, grouped by front end, in messages of about `MESSAGE_BYTES`."""
        by_address: dict[str, list[GroupChunk]] = {}
        for item in items:
            by_address.setdefault(self._routes[item.request_id], []).append(item)
        for address, batch in by_address.items():
            for part in _parts(batch):
                message = ChunksMessage(self._instance, self._stage, part)
                self._outbox.send(address, message, self._bounded)

    def submit_request_end(
        self, request_id: str, finalizes: Sequence[CaptureFinalize]
    ) -> None:
        """Send the end of a request, with the sidecars of all keys."""
        ends = [GroupEnd(one.key[0], (one.key[1:],), one.sidecar) for one in finalizes]
        self._send_end(request_id, ends)

    def submit_ends(
        self, request_id: str, ends: Sequence[GroupEnd]
    ) -> list[CaptureResult]:
        """Send the end of a request, with the sidecars of all groups of keys."""
        self._send_end(request_id, ends)
        return [CaptureResult((end.request_id, *end.taps[0]), "ok") for end in ends]

    def _send_end(self, request_id: str, ends: Sequence[GroupEnd]) -> None:
        address = self._routes.pop(request_id)
        message = EndMessage(request_id, self._instance, self._stage, list(ends))
        self._outbox.send(address, message, self._bounded)
        self._ended.add(request_id)

    def passed_on(self, request_id: str) -> bool:
        """Whether the end was sent, so that the front end's lane gives the result.

        Forgets the request.
        """
        passed = request_id in self._ended
        self._ended.discard(request_id)
        return passed

    def submit_finalize(self, finalize: CaptureFinalize) -> None:
        """Do nothing: the request's end is sent with all keys."""

    def get_result(self, key: CaptureKey) -> CaptureResult | None:
        """Always `"ok"`: the result comes from the lane in the front end."""
        return CaptureResult(key, "ok")

    def shutdown(self, timeout: float = 30.0) -> None:
        """Do nothing: the outbox is closed by its owner."""


def _parts(items: Sequence[GroupChunk]) -> Iterator[list[GroupChunk]]:
    """Split rows by size, because connections bound the number of messages."""
    part: list[GroupChunk] = []
    size = 0
    for chunk in (one for item in items for one in _cut(item)):
        part.append(chunk)
        size += chunk.tensor.nbytes
        if size >= MESSAGE_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _cut(chunk: GroupChunk) -> Iterator[GroupChunk]:
    """Split the taps of a chunk that is larger than a message."""
    taps, rows = chunk.taps, chunk.tensor
    at_once = max(len(taps) * MESSAGE_BYTES // max(rows.nbytes, 1), 1)
    for first in range(0, len(taps), at_once):
        last = first + at_once
        yield structs.replace(chunk, taps=taps[first:last], tensor=rows[first:last])


class LiveSink(ForwardingSink):
    """Forwards the rows of streaming requests to the front end as they are settled.

    The front end itself knows which rows are valid and when the request ends.
    """

    _bounded = False

    def __init__(self, instance: str, stage: int, outbox: Outbox) -> None:
        super().__init__(instance, stage, outbox, truncates=True)

    def route(self, request_id: str, address: str) -> None:
        """Set the address of a request: the front end's own, which is not bounded."""
        self._routes[request_id] = address

    def _send_end(self, request_id: str, ends: Sequence[GroupEnd]) -> None:
        """Forget the request; its end is reported by the consumer's own sink."""
        self._routes.pop(request_id)
        self._ended.add(request_id)
