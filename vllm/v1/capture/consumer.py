# SPDX-License-Identifier: Apache-2.0
"""`CaptureConsumer`, the base class of most consumers of captured rows."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from vllm.logger import init_logger
from vllm.v1.capture.capabilities import group_method
from vllm.v1.capture.groups import GroupChunk, GroupEnd, GroupSink, OnGroup
from vllm.v1.capture.memory.buffer_pool import ROWS
from vllm.v1.capture.results import join_payloads

# Plug-ins import both base classes from here.
from vllm.v1.capture.sync import SyncCaptureConsumer as SyncCaptureConsumer
from vllm.v1.capture.types import (
    CaptureContext,
    CaptureFinalize,
    CaptureKey,
    CaptureResult,
    CaptureSpec,
)
from vllm.v1.residual.plugin_errors import FAILURES, described
from vllm.v1.residual.tap import Tap

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)


class CaptureConsumer(ABC):
    """Receives all rows of a key in one call, after the request has ended.

    To receive rows while the request runs, implement `CaptureSink` instead.

    The process of the `LLM` or the API server always has an instance, for
    `validate_client_spec` and `global_capture_spec`. `on_capture` is called on an
    instance in each worker (`location = "worker"`) or on that same instance
    (`location = "driver"`).
    """

    location: Literal["worker", "driver"] = "worker"
    """Where `on_capture` runs."""

    instance_name: str = ""
    """The name that requests use; the framework sets it from the configuration.

    An instance that is passed to `LLM(capture_consumers=[...])` ready-made may set it
    itself; the default is the name of its class.
    """

    reads_client_spec: ClassVar[bool] = False
    """Whether a request may name this consumer in `SamplingParams.capture`."""

    remembers_specs: ClassVar[bool] = True
    """Whether `validate_client_spec` stores state that `on_capture` needs.

    If so, it is called again for each sample of an admitted request, on the instance
    that receives the rows, with the internal request id that is in their keys.
    """

    waits: ClassVar[bool] = False
    """Whether a request that names this consumer always waits for its results."""

    streams: ClassVar[bool] = False
    """Whether intermediate outputs carry the rows computed so far."""

    takes_readouts: ClassVar[bool] = False
    """Whether a request's spec may name readouts whose results it takes, as keys whose
    hook is `HOOK.NAME.ARRAY`; their sidecars have `readout`, and their own `dtype` and
    `hidden_size`. `validate_client_spec` must accept the key `readouts`."""

    required_sidecar_fields: ClassVar[frozenset[str]] = frozenset()
    """Sidecar fields that the consumer needs; a subset of `REQUIRABLE_FIELDS`."""

    def __init__(  # noqa: B027 (a default that does nothing is meant)
        self, vllm_config: "VllmConfig", params: dict[str, Any]
    ) -> None:
        """Called once per process.

        Args:
            vllm_config: the engine's configuration.
            params: the parameters of this instance in the configuration.

        """

    @classmethod  # noqa: B027
    def check_params(cls, params: dict[str, Any]) -> None:
        """Refuse parameters that are wrong, before the model is loaded.

        Args:
            params: those of the configuration.

        Raises:
            Exception: whose message names the parameter, the value and the remedy.

        """

    def global_capture_spec(self) -> CaptureSpec | None:
        """What to capture of every request, or None."""
        return None

    def validate_client_spec(self, raw: Any, ctx: CaptureContext) -> CaptureSpec:
        """Parse a request's spec for this consumer.

        Args:
            raw: the value of `SamplingParams.capture[instance_name]`.
            ctx: facts about the request and the model.

        Returns:
            The hooks, layers and positions to capture.

        Raises:
            CaptureValidationError: the request is invalid; it is refused (HTTP 400)
                with this message.

        """
        raise NotImplementedError(
            f"{type(self).__name__} sets reads_client_spec, so it must define "
            "validate_client_spec(raw, ctx)"
        )

    @abstractmethod
    def on_capture(
        self, key: CaptureKey, tensor: torch.Tensor, sidecar: dict[str, Any]
    ) -> Any:
        """Take all rows of one key.

        Args:
            key: `(request id, layer, hook)`.
            tensor: `[rows, hidden_size]` on the CPU, in the stream's dtype.
            sidecar: facts about the request and its rows; see `SIDECAR_FIELDS`.

        Returns:
            The payload of the key's result.

        Raises:
            Exception: anything raised makes the key's result an error.

        """

    def on_error(  # noqa: B027
        self, key: CaptureKey, error: str
    ) -> None:
        """Called when the capture of `key` failed, with the message of its result."""

    def shutdown(self, timeout: float = 30.0) -> None:  # noqa: B027
        """Called when the engine stops; finish within `timeout` seconds."""


class BatchingSink(GroupSink):
    """A `CaptureSink` that collects the rows of a request for calls of its consumer.

    It calls `on_group` once for all keys of a group if the consumer has that method,
    otherwise `on_capture` for each key.
    """

    def __init__(self, consumer: CaptureConsumer) -> None:
        self._consumer = consumer
        self.location = consumer.location
        self._on_group = group_method(consumer)
        self._items: dict[str, list[GroupChunk]] = {}
        """The rows of each request, in order, until one of its keys ends."""
        self._rows: dict[CaptureKey, list[torch.Tensor]] = {}
        """The rows of keys that are ended one by one."""
        self._results: dict[CaptureKey, CaptureResult] = {}

    def submit_rows(self, items: Sequence[GroupChunk]) -> None:
        """Keep the rows until the request has ended."""
        for item in items:
            self._items.setdefault(item.request_id, []).append(item)

    def submit_finalize(self, finalize: CaptureFinalize) -> None:
        """Call `on_capture` with the rows of the key."""
        key = finalize.key
        for item in self._items.pop(key[0], ()):
            for own, rows in zip(item.keys, item.tensor.split(1), strict=True):
                self._rows.setdefault(own, []).append(rows)
        parts = self._rows.pop(key, [])
        try:
            if finalize.sidecar.get("capture_error"):
                raise RuntimeError(finalize.sidecar["capture_error"])
            width = finalize.sidecar.get("hidden_size", 0)
            rows = ROWS.cat(parts)[0] if parts else torch.empty(0, width)
            payload = self._consumer.on_capture(key, rows, finalize.sidecar)
        except Exception as error:
            message = described(error)
            if not finalize.sidecar.get("capture_error"):
                FAILURES.log(self._name, key, error)
            self._results[key] = CaptureResult(key, "error", message)
            self._report(key, message)
        else:
            self._results[key] = CaptureResult(key, "ok", payload=payload)

    def submit_ends(
        self, request_id: str, ends: Sequence[GroupEnd]
    ) -> list[CaptureResult] | None:
        """Call `on_group` for each group.

        Large groups arrive in parts, for each of which it is called. If the parts of
        different steps have different taps, or the taps of a part have different ends,
        as after rows were dropped, the keys must be ended one by one.
        """
        if self._on_group is None:
            return None
        ended = {tap: number for number, end in enumerate(ends) for tap in end.taps}
        if any((request_id, *tap) in self._rows for tap in ended):
            return None  # Another stage was ended one by one.
        parts: dict[tuple[Tap, ...], list[torch.Tensor]] = {}
        others: list[GroupChunk] = []
        for item in self._items.get(request_id, ()):
            if item.taps[0] in ended:
                parts.setdefault(item.taps, []).append(item.tensor)
            else:  # Of another pipeline stage, which sends its ends itself.
                others.append(item)
        if len({tap for taps in parts for tap in taps}) < sum(map(len, parts)):
            return None
        if any(len({ended.get(tap) for tap in taps}) > 1 for taps in parts):
            return None
        self._items.pop(request_id, None)
        if others:
            self._items[request_id] = others
        return [self._result_of(end, parts, self._on_group) for end in ends]

    def _result_of(
        self,
        end: GroupEnd,
        parts: Mapping[tuple[Tap, ...], Sequence[torch.Tensor]],
        on_group: OnGroup,
    ) -> CaptureResult:
        key = (end.request_id, *end.taps[0])
        try:
            own = {t: ROWS.cat(parts[t]) for t in parts if t[0] in end.taps}
            if not own:
                width = end.sidecar.get("hidden_size", 0)
                own = {end.taps: torch.empty(len(end.taps), 0, width)}
            payloads = [on_group(taps, rows, end.sidecar) for taps, rows in own.items()]
            return CaptureResult(key, "ok", payload=join_payloads(payloads))
        except Exception as error:
            message = described(error)
            FAILURES.log(self._name, key, error)
            for tap in end.taps:
                self._report((end.request_id, *tap), message)
            return CaptureResult(key, "error", message)

    @property
    def _name(self) -> str:
        return self._consumer.instance_name or type(self._consumer).__name__

    def _report(self, key: CaptureKey, message: str) -> None:
        try:
            self._consumer.on_error(key, message)
        except Exception:
            # The result keeps the first error.
            logger.exception("A consumer's on_error failed on %s", key)

    def get_result(self, key: CaptureKey) -> CaptureResult | None:
        """The result of `key`, which is removed; None if there is none."""
        return self._results.pop(key, None)

    def shutdown(self, timeout: float = 30.0) -> None:
        """Shut down the consumer."""
        self._consumer.shutdown(timeout)


_BatchedAdapter = BatchingSink
"""Name in an earlier fork, still used by the tests of plug-ins."""
