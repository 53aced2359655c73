# SPDX-License-Identifier: Apache-2.0
"""The streaming interface between the capture framework and a consumer."""

from typing import Literal, Protocol, runtime_checkable

from vllm.v1.capture.types import (
    CaptureChunk,
    CaptureFinalize,
    CaptureKey,
    CaptureResult,
)


@runtime_checkable
class CaptureSink(Protocol):
    """Receives rows as they are settled; one instance serves all requests.

    For one key chunks arrive in ascending `row_offset` and before the key's
    finalize; keys have no order among each other. All calls for an instance
    come from one thread of its own, never from the engine's, so a method may
    block; `get_result` may be called from it at any time after the finalize.

    Optional: `submit_chunk_batch(chunks)` receives the chunks of a step at once;
    `submit_request_end(request_id, finalizes)` comes after the finalizes of all
    keys of a request; `when_done(request_id, notify)` calls `notify` once, from
    any thread, when the request's results are there, and meanwhile the sink gets
    the rows of other requests (without it the sink is waited for);
    `wait_for_result(key, timeout)` blocks until a result is there;
    `truncates = True` says that rows of generated tokens may be submitted before
    it is known that they count, and that the finalize's sidecar holds in
    `num_rows` how many rows of the key count. Without it such rows are held
    back until the request has ended;
    `batches_steps = True`, beside `truncates`, says that rows need not come with
    each step: those of several small steps may come together, which costs less.
    """

    location: Literal["worker", "driver"]

    def submit_chunk(self, chunk: CaptureChunk) -> None:
        """Take rows of one key."""
        ...

    def submit_finalize(self, finalize: CaptureFinalize) -> None:
        """The key is complete: flush it and make `get_result(key)` terminal."""
        ...

    def get_result(self, key: CaptureKey) -> CaptureResult | None:
        """The terminal result of `key`, or None while there is none."""
        ...

    def shutdown(self, timeout: float = 30.0) -> None:
        """Finish what is under way within `timeout` seconds."""
        ...
