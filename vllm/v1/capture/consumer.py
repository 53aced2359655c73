# SPDX-License-Identifier: Apache-2.0
"""The base class that most consumers of captured rows extend."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from vllm.logger import init_logger
from vllm.v1.capture.failures import FAILURES, described
from vllm.v1.capture.memory.buffer_pool import ROWS
from vllm.v1.capture.types import (
    CaptureChunk,
    CaptureContext,
    CaptureFinalize,
    CaptureKey,
    CaptureResult,
    CaptureSpec,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)


class CaptureConsumer(ABC):
    """Gets each key's rows at once, when the request has ended.

    Where rows must be seen as they are produced, implement `CaptureSink`
    instead. An instance lives in each process that needs it: in the workers
    (`location = "worker"`) or in the process that holds the `LLM` or the API
    server (`"driver"`) for `on_capture`, and always also in the latter for
    `validate_client_spec` and `global_capture_spec`.
    """

    location: Literal["worker", "driver"] = "worker"
    """Where `on_capture` runs."""

    instance_name: str = ""
    """The name that requests use, set once the instance is configured under it. A
    ready instance may say itself what it is called; otherwise its class's name is."""

    reads_client_spec: ClassVar[bool] = False
    """Whether a request may name this consumer in `SamplingParams.capture`."""

    remembers_specs: ClassVar[bool] = True
    """Whether `validate_client_spec` keeps something for `on_capture`. Then it is
    called a second time for each sample of an admitted request, on the instance that
    gets the rows, with the internal id that their keys have."""

    waits: ClassVar[bool] = False
    """Whether a request that names this consumer always waits for its results."""

    streams: ClassVar[bool] = False
    """Whether outputs before the last carry the rows that have come by then."""

    required_sidecar_fields: ClassVar[frozenset[str]] = frozenset()
    """Sidecar fields that the consumer cannot do without; see `SIDECAR_FIELDS`."""

    def __init__(  # noqa: B027 (a default that does nothing is meant)
        self, vllm_config: "VllmConfig", params: dict[str, Any]
    ) -> None:
        """Called once per process.

        Args:
            vllm_config: the engine's configuration.
            params: what the configuration gives this instance.

        """

    def global_capture_spec(self) -> CaptureSpec | None:
        """What to capture of every request, or None."""
        return None

    def validate_client_spec(self, raw: Any, ctx: CaptureContext) -> CaptureSpec:
        """What to capture of a request that carries `raw` for this consumer.

        Raises:
            CaptureValidationError: the request is refused with this message.

        """
        raise NotImplementedError(
            f"{type(self).__name__} sets reads_client_spec, so it must define "
            "validate_client_spec(raw, ctx)"
        )

    @abstractmethod
    def on_capture(
        self, key: CaptureKey, tensor: torch.Tensor, sidecar: dict[str, Any]
    ) -> Any:
        """Take all rows of one key; what it returns becomes the result's payload.

        Args:
            key: `(request id, layer, hook)`.
            tensor: `[rows, hidden_size]` on the CPU, in the stream's dtype.
            sidecar: facts about the request and its rows.

        """

    def on_error(  # noqa: B027
        self, key: CaptureKey, error: str
    ) -> None:
        """The capture of `key` failed."""

    def shutdown(self, timeout: float = 30.0) -> None:  # noqa: B027
        """The engine stops; finish within `timeout` seconds."""


class BatchingSink:
    """A `CaptureSink` that collects a key's chunks and calls `on_capture` once."""

    def __init__(self, consumer: CaptureConsumer) -> None:
        self._consumer = consumer
        self.location = consumer.location
        self._chunks: dict[CaptureKey, list[torch.Tensor]] = {}
        self._results: dict[CaptureKey, CaptureResult] = {}

    def submit_chunk(self, chunk: CaptureChunk) -> None:
        """Keep the rows until the key is finalized."""
        self._chunks.setdefault(chunk.key, []).append(chunk.tensor)

    def submit_finalize(self, finalize: CaptureFinalize) -> None:
        """Hand the key's rows to the consumer."""
        key = finalize.key
        chunks = self._chunks.pop(key, [])
        try:
            if finalize.sidecar.get("capture_error"):
                raise RuntimeError(finalize.sidecar["capture_error"])
            width = finalize.sidecar.get("hidden_size", 0)
            rows = ROWS.cat(chunks) if chunks else torch.empty(0, width)
            payload = self._consumer.on_capture(key, rows, finalize.sidecar)
        except Exception as error:
            message = described(error)
            if not finalize.sidecar.get("capture_error"):
                name = self._consumer.instance_name or type(self._consumer).__name__
                FAILURES.tell(name, key, error)
            self._results[key] = CaptureResult(key, "error", message)
            self._tell(key, message)
        else:
            self._results[key] = CaptureResult(key, "ok", payload=payload)

    def _tell(self, key: CaptureKey, message: str) -> None:
        try:
            self._consumer.on_error(key, message)
        except Exception:
            # What went wrong first is what the result says.
            logger.exception("A consumer's on_error failed on %s", key)

    def get_result(self, key: CaptureKey) -> CaptureResult | None:
        """The key's result; it is given once."""
        return self._results.pop(key, None)

    def shutdown(self, timeout: float = 30.0) -> None:
        """Shut the consumer down."""
        self._consumer.shutdown(timeout)


_BatchedAdapter = BatchingSink
"""Its name in an earlier fork, by which the tests of plug-ins know it."""
