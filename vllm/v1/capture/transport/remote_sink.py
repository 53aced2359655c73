# SPDX-License-Identifier: Apache-2.0
"""Sinks in a worker that forward rows to the front end's process."""

from collections.abc import Iterator
from typing import Literal

from vllm.v1.capture.transport.zmq_channel import (
    ChunksMessage,
    EndMessage,
    KeyedValue,
    Outbox,
    WireChunk,
    rows_address,
)
from vllm.v1.capture.types import (
    CaptureChunk,
    CaptureFinalize,
    CaptureKey,
    CaptureResult,
)

MESSAGE_BYTES = 8 << 20


class ForwardingSink:
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

    def submit_chunk(self, chunk: CaptureChunk) -> None:
        """Send one chunk."""
        self.submit_chunk_batch([chunk])

    def submit_chunk_batch(self, chunks: list[CaptureChunk]) -> None:
        """Send chunks, grouped by front end, in messages of about `MESSAGE_BYTES`."""
        by_address: dict[str, list[CaptureChunk]] = {}
        for chunk in chunks:
            by_address.setdefault(self._routes[chunk.key[0]], []).append(chunk)
        for address, batch in by_address.items():
            for part in _parts(batch):
                wire = [WireChunk.of(chunk) for chunk in part]
                message = ChunksMessage(self._instance, self._stage, wire)
                self._outbox.send(address, message, self._bounded)

    def submit_request_end(
        self, request_id: str, finalizes: tuple[CaptureFinalize, ...]
    ) -> None:
        """Send the end of a request, with the sidecars of all keys."""
        sidecars = [
            KeyedValue(final.key[1], final.key[2], final.sidecar) for final in finalizes
        ]
        address = self._routes.pop(request_id)
        message = EndMessage(request_id, self._instance, self._stage, sidecars)
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
        """Do nothing: `submit_request_end` sends all keys together."""

    def get_result(self, key: CaptureKey) -> CaptureResult | None:
        """Always `"ok"`: the result comes from the lane in the front end."""
        return CaptureResult(key, "ok")

    def shutdown(self, timeout: float = 30.0) -> None:
        """Do nothing: the outbox is closed by its owner."""


def _parts(chunks: list[CaptureChunk]) -> Iterator[list[CaptureChunk]]:
    """Split chunks by size, because connections bound the number of messages."""
    part: list[CaptureChunk] = []
    size = 0
    for chunk in chunks:
        part.append(chunk)
        size += chunk.tensor.nbytes
        if size >= MESSAGE_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


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

    def submit_request_end(
        self, request_id: str, finalizes: tuple[CaptureFinalize, ...]
    ) -> None:
        """Forget the request; its end is reported by the consumer's own sink."""
        self._routes.pop(request_id)
        self._ended.add(request_id)
