# SPDX-License-Identifier: Apache-2.0
"""A worker's stand-in for a consumer that lives in the front end's process."""

from typing import Literal

from vllm.v1.capture.channel import (
    ChunksMessage,
    EndMessage,
    KeyedValue,
    Outbox,
    WireChunk,
)
from vllm.v1.capture.types import (
    CaptureChunk,
    CaptureFinalize,
    CaptureKey,
    CaptureResult,
)


class ForwardingSink:
    """Sends each request's chunks and endings to the front end that admitted it."""

    location: Literal["worker", "driver"] = "driver"

    def __init__(self, instance: str, stage: int, outbox: Outbox) -> None:
        self._instance = instance
        self._stage = stage
        self._outbox = outbox
        self._routes: dict[str, str] = {}
        self._ended: set[str] = set()

    def route(self, request_id: str, address: str) -> None:
        """Say where the request's front end listens, before its first row."""
        self._routes[request_id] = address

    def submit_chunk(self, chunk: CaptureChunk) -> None:
        """Send one chunk."""
        self.submit_chunk_batch([chunk])

    def submit_chunk_batch(self, chunks: list[CaptureChunk]) -> None:
        """Send a step's chunks, one message per front end."""
        by_address: dict[str, list[WireChunk]] = {}
        for chunk in chunks:
            address = self._routes[chunk.key[0]]
            by_address.setdefault(address, []).append(WireChunk.of(chunk))
        for address, batch in by_address.items():
            self._outbox.send(
                address, ChunksMessage(self._instance, self._stage, batch)
            )

    def submit_request_end(
        self, request_id: str, finalizes: tuple[CaptureFinalize, ...]
    ) -> None:
        """Send the end of all streams of a request."""
        sidecars = [
            KeyedValue(final.key[1], final.key[2], final.sidecar) for final in finalizes
        ]
        address = self._routes.pop(request_id)
        self._outbox.send(
            address, EndMessage(request_id, self._instance, self._stage, sidecars)
        )
        self._ended.add(request_id)

    def passed_on(self, request_id: str) -> bool:
        """Whether the front end's own lane will give the result; asked once."""
        passed = request_id in self._ended
        self._ended.discard(request_id)
        return passed

    def submit_finalize(self, finalize: CaptureFinalize) -> None:
        """Nothing to do: the end of a request travels as a whole."""

    def get_result(self, key: CaptureKey) -> CaptureResult | None:
        """The front end's own lane has the result; here there is nothing to add."""
        return CaptureResult(key, "ok")

    def shutdown(self, timeout: float = 30.0) -> None:
        """The outbox is closed by its owner."""
