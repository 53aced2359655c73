# SPDX-License-Identifier: Apache-2.0
"""The streaming interface between the capture framework and a consumer."""

from typing import Literal, Protocol, runtime_checkable

import torch

from vllm.v1.capture.types import (
    CaptureChunk,
    CaptureFinalize,
    CaptureKey,
    CaptureResult,
)


@runtime_checkable
class CaptureSink(Protocol):
    """Receives chunks of rows while requests run; one instance serves all requests.

    The chunks of a key arrive in ascending `row_offset` and before the finalize of the
    key; different keys have no order. All calls on an instance come from one thread
    that serves only this instance, not from the engine's thread, so methods may block.
    `get_result` may be called at any time after the finalize.

    Optional methods:

    - `submit_chunk_batch(chunks)`: receives all chunks of a step in one call.
    - `submit_request_end(request_id, finalizes)`: called after the finalizes of all
      keys of a request.
    - `when_done(request_id, notify)`: must call `notify` once, from any thread, when
      all results of the request exist. Until then the sink receives rows of other
      requests. Without this method the framework waits for the results.
    - `wait_for_result(key, timeout)`: blocks until the result exists, `timeout`
      seconds at most.
    - `row_encoder(width, dtype, device)`: called once in a worker with a GPU, before
      any row, if no other consumer of the worker takes rows. If it returns a
      `RowEncoder`, chunks hold rows as encoded on the device.
    - `rewritten_bytes()`: the total bytes of rows that the sink has written twice, for
      the counters; called on any thread.

    Optional attributes:

    - `truncates = True`: rows of generated tokens may be submitted before it is known
      whether the output includes these tokens; `num_rows` in the finalize's sidecar
      says how many rows of the key are valid. Without it such rows are held back until
      the request has ended.
    - `batches_steps = True` (with `truncates`): the rows of several small steps may be
      submitted together, which costs less than submitting each step.
    - `max_call_seconds`: how long one call may take, in seconds, if that is longer than
      the default limit (`STALL_SECONDS` of the consumer thread). A sink that exceeds it
      counts as stalled, and its requests fail.
    """

    location: Literal["worker", "driver"]

    def submit_chunk(self, chunk: CaptureChunk) -> None:
        """Take rows of one key; the sink owns the tensor."""
        ...

    def submit_finalize(self, finalize: CaptureFinalize) -> None:
        """All chunks of a key were submitted: finish it, so that it gets a result."""
        ...

    def get_result(self, key: CaptureKey) -> CaptureResult | None:
        """The final result of `key`, or None while there is none."""
        ...

    def shutdown(self, timeout: float = 30.0) -> None:
        """Finish all pending work within `timeout` seconds."""
        ...


class RowEncoder(Protocol):
    """Encodes rows on the device, so that fewer bytes are copied to the host."""

    @property
    def width(self) -> int:
        """Values per encoded row."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of these values."""
        ...

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Encode rows `[n, hidden_size]` to `[n, width]`, on the same device.

        Called on the engine's thread. It queues its work on the current stream and
        must not wait for the device. Rows that no request has captured may contain any
        values.
        """
        ...
