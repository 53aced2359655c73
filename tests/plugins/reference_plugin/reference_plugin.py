# SPDX-License-Identifier: Apache-2.0
"""Plug-ins that use exactly the public interface, each of them a part of it.

The framework knows none of them: they import only public names, take arguments by
position under other names, return None where no result is needed, and never forget a
result.
"""

import json
import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from vllm.v1.capture import (
    CaptureChunk,
    CaptureConsumer,
    CaptureContext,
    CaptureFinalize,
    CaptureKey,
    CaptureResult,
    CaptureSink,
    CaptureSpec,
    CaptureValidationError,
    HookName,
    PositionSelector,
    VllmInternalRequestId,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Log:
    """Lines of JSON for a test, written by any process."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        self._path = Path(params["log"])

    def write(self, event: str, **facts: Any) -> None:
        with open(self._path, "a") as file:
            file.write(json.dumps({"event": event} | facts) + "\n")


class Sums(CaptureConsumer):
    """A consumer with a global spec, without requests and payload."""

    location: ClassVar[Literal["worker", "driver"]] = "worker"  # type: ignore[misc]
    required_sidecar_fields: ClassVar[frozenset[str]] = frozenset(
        {"client_request_id", "vllm_internal_request_id"}
    )

    def __init__(self, vllm_config: "VllmConfig", params: dict[str, Any]) -> None:
        super().__init__(vllm_config, params)
        self.log = Log(params)
        self._width = vllm_config.model_config.get_hidden_size()
        self._layers: list[int] = params.get("layers", [0])

    def global_capture_spec(self) -> CaptureSpec:
        hook: HookName = "post_block"
        return CaptureSpec(hooks={hook: self._layers}, positions="last_prompt")

    def on_capture(
        self, key: CaptureKey, tensor: torch.Tensor, sidecar: dict[str, Any]
    ) -> None:
        assert tensor.device.type == "cpu" and tensor.shape == (1, self._width)
        self.log.write(
            "sum",
            key=key,
            sum=float(tensor.double().sum()),
            client=sidecar["client_request_id"],
            internal=sidecar["vllm_internal_request_id"],
        )

    def shutdown(self, timeout: float = 30.0) -> None:
        self.log.write("shutdown", timeout=timeout)


class Wishes(CaptureConsumer):
    """A consumer of requests; stores their specs by the engine's request id."""

    reads_client_spec: ClassVar[bool] = True

    def __init__(self, vllm_config: "VllmConfig", params: dict[str, Any]) -> None:
        self.log = Log(params)
        self._said: dict[VllmInternalRequestId, Any] = {}

    def validate_client_spec(
        self, raw_spec: Any, context: CaptureContext
    ) -> CaptureSpec:
        if not isinstance(raw_spec, dict):
            raise TypeError(f"a wish must be a dict, not {type(raw_spec).__name__}")
        if raw_spec.get("grumpy"):
            raise CaptureValidationError("not today; leave out grumpy")
        assert 0 <= context.num_computed_tokens <= context.num_prompt_tokens
        assert context.hidden_size * context.element_size_bytes > 0
        assert context.tensor_parallel_size * context.pipeline_parallel_size == 1
        every = list(range(context.num_hidden_layers))
        hooks: dict[HookName, list[int]] = raw_spec.get("hooks", {"post_block": every})
        positions: PositionSelector = raw_spec.get("positions", "all_prompt")
        self._said[context.vllm_internal_request_id] = raw_spec
        return CaptureSpec(hooks, positions)

    def on_capture(
        self, key: CaptureKey, tensor: torch.Tensor, sidecar: dict[str, Any]
    ) -> None:
        request_id, layer, _ = key
        said = self._said[request_id]
        if layer in said.get("fails", []):
            raise RuntimeError(f"layer {layer} makes me fail")
        self.log.write("wish", key=key, rows=len(tensor), wish=said.get("wish"))

    def on_error(self, key: CaptureKey, error: str) -> None:
        self.log.write("error", key=key, error=error)


class Reward:
    """A sink without a base class, whose `submit_finalize` sets the result."""

    location: ClassVar[Literal["worker"]] = "worker"
    reads_client_spec: ClassVar[bool] = True

    def __init__(self, vllm_config: "VllmConfig", params: dict[str, Any]) -> None:
        self._layer = int(params.get("layer", 0))
        self._lock = threading.Lock()
        self._pending: dict[CaptureKey, list[tuple[int, torch.Tensor]]] = {}
        self._results: dict[CaptureKey, CaptureResult] = {}

    def global_capture_spec(self) -> CaptureSpec | None:
        return None

    def validate_client_spec(self, raw_spec: Any, ctx: CaptureContext) -> CaptureSpec:
        if raw_spec not in (None, {}):
            raise CaptureValidationError(f"say nothing to it; got {raw_spec!r}")
        return CaptureSpec({"post_block": [self._layer]}, "all_generated")

    def submit_chunk(self, chunk: CaptureChunk) -> None:
        assert chunk.tensor.dtype == chunk.dtype
        with self._lock:
            pending = self._pending.setdefault(chunk.key, [])
            pending.append((chunk.row_offset, chunk.tensor))

    def submit_finalize(self, finalize: CaptureFinalize) -> None:
        with self._lock:
            chunks = self._pending.pop(finalize.key, [])
            ordered = [tensor for _, tensor in sorted(chunks, key=lambda c: c[0])]
            rows = torch.cat(ordered) if ordered else torch.empty(0, 1)
            reward = {"reward": float(rows.float().mean()), "rows": len(rows)}
            result = CaptureResult(key=finalize.key, status="ok", payload=reward)
            self._results[finalize.key] = result

    def get_result(self, key: CaptureKey) -> CaptureResult | None:
        with self._lock:
            return self._results.get(key)

    def shutdown(self, timeout: float = 30.0) -> None:
        with self._lock:
            self._pending.clear()


class Writer:
    """A sink with a thread: calls return before their work is done."""

    location: Literal["worker", "driver"] = "worker"
    reads_client_spec = True

    def __init__(self, vllm_config: "VllmConfig", params: dict[str, Any]) -> None:
        self.log = Log(params)
        self._work: queue.Queue[Any] = queue.Queue()
        self._rows: dict[CaptureKey, int] = {}
        self._results: dict[CaptureKey, CaptureResult] = {}
        self._done = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert isinstance(self, CaptureSink)

    def validate_client_spec(self, raw: Any, ctx: CaptureContext) -> CaptureSpec:
        return CaptureSpec(raw["hooks"], raw["positions"])

    def submit_chunk(self, chunk: CaptureChunk) -> None:
        raise AssertionError("whole batches are taken, so this is not called")

    def submit_chunk_batch(self, chunks: list[CaptureChunk]) -> None:
        for chunk in chunks:
            self._work.put(chunk)

    def submit_finalize(self, finalize: CaptureFinalize) -> None:
        self._work.put(finalize)

    def get_result(self, key: CaptureKey) -> CaptureResult | None:
        with self._done:
            return self._results.get(key)

    def wait_for_result(self, key: CaptureKey, timeout: float) -> CaptureResult | None:
        with self._done:
            self._done.wait_for(lambda: key in self._results, timeout)
            return self._results.get(key)

    def shutdown(self, timeout: float = 30.0) -> None:
        self._work.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            if isinstance(item, CaptureChunk):
                before = self._rows.get(item.key, 0)
                assert item.row_offset == before, "chunks are not in order"
                self._rows[item.key] = before + len(item.tensor)
                continue
            key, rows = item.key, self._rows.pop(item.key, 0)
            self.log.write("written", key=key, rows=rows)
            with self._done:
                self._results[key] = CaptureResult(key, "ok", payload=[str(rows)])
                self._done.notify_all()


class Norms(CaptureConsumer):
    """A consumer in the driver's process."""

    location = "driver"
    reads_client_spec = True

    def validate_client_spec(self, raw: Any, ctx: CaptureContext) -> CaptureSpec:
        return CaptureSpec(raw["hooks"], raw["positions"])

    def on_capture(
        self, key: CaptureKey, tensor: torch.Tensor, sidecar: dict[str, Any]
    ) -> dict[tuple[int, str], list[float]]:
        return {(key[1], key[2]): tensor.float().norm(dim=-1).tolist()}
