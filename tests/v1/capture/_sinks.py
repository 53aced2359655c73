# SPDX-License-Identifier: Apache-2.0
"""Consumers with one fault each, and one that only records."""

import threading
from typing import Any, Literal

import torch

from vllm.v1.capture.consumer import CaptureConsumer
from vllm.v1.capture.delivery.consumer_thread import Ending, SinkLane
from vllm.v1.capture.groups import GroupChunk, GroupEnd
from vllm.v1.capture.types import (
    CaptureChunk,
    CaptureFinalize,
    CaptureKey,
    CaptureResult,
    VllmInternalRequestId,
)

WAIT = 10.0
"""Seconds after which a test gives up waiting for another thread."""


def key(request: str = "r", layer: int = 0) -> CaptureKey:
    return (VllmInternalRequestId(request), layer, "post_block")


def chunk(of: CaptureKey, rows: int = 1, offset: int = 0) -> GroupChunk:
    tensor = torch.arange(rows, dtype=torch.float32)[None, :, None] + offset
    positions = list(range(offset, offset + rows))
    return GroupChunk(of[0], (of[1:],), tensor, offset, 0, positions)


class RecordingSink:
    """Accepts everything; `wrong` names the method that raises for layer 1."""

    location: Literal["worker", "driver"] = "worker"

    def __init__(
        self, wrong: str = "", error: type[BaseException] = ValueError
    ) -> None:
        self.wrong = wrong
        self.error = error
        self.calls: list[tuple[str, Any]] = []
        self.threads: set[str] = set()

    def _note(self, method: str, what: Any) -> None:
        self.threads.add(threading.current_thread().name)
        self.calls.append((method, what))
        if method == self.wrong and what[1] == 1:
            raise self.error(f"{method} went wrong")

    def submit_chunk(self, chunk: CaptureChunk) -> None:
        self._note("submit_chunk", chunk.key)

    def submit_finalize(self, finalize: CaptureFinalize) -> None:
        self._note("submit_finalize", finalize.key)

    def get_result(self, key: CaptureKey) -> CaptureResult | None:
        self._note("get_result", key)
        return CaptureResult(key, "ok", payload=[key[1]])

    def shutdown(self, timeout: float = 30.0) -> None:
        self._note("shutdown", (None, 1))


class SlowSink(RecordingSink):
    """Holds every chunk until the test releases it."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Semaphore(0)
        self.let_go = threading.Semaphore(0)

    def submit_chunk(self, chunk: CaptureChunk) -> None:
        self.entered.release()
        assert self.let_go.acquire(timeout=WAIT)
        super().submit_chunk(chunk)


class KeepingConsumer(CaptureConsumer):
    """Keeps the arguments of `on_capture`; raises for the layers in `refuses`."""

    location = "driver"
    reads_client_spec = True

    def __init__(self, refuses: frozenset[int] = frozenset()) -> None:
        self.refuses = refuses
        self.rows: dict[CaptureKey, torch.Tensor] = {}
        self.sidecars: dict[CaptureKey, dict[str, Any]] = {}
        self.errors: dict[CaptureKey, str] = {}

    def on_capture(
        self, key: CaptureKey, tensor: torch.Tensor, sidecar: dict[str, Any]
    ) -> str:
        if key[1] in self.refuses:
            raise RuntimeError("not this layer")
        self.rows[key] = tensor
        self.sidecars[key] = sidecar
        return f"kept {len(tensor)}"

    def on_error(self, key: CaptureKey, error: str) -> None:
        self.errors[key] = error


class Answers:
    """Collects a lane's answers, and lets a test wait for them."""

    def __init__(self) -> None:
        self.results: list[CaptureResult] = []
        self._came = threading.Semaphore(0)

    def __call__(self, result: CaptureResult) -> None:
        self.results.append(result)
        self._came.release()

    def next(self) -> CaptureResult:
        assert self._came.acquire(timeout=WAIT), "the lane gave no answer"
        return self.results[-1]


def end(
    lane: SinkLane, answers: Answers, *keys: CaptureKey, **sidecar: Any
) -> CaptureResult:
    """Finalize a request with these keys, and wait for its result."""
    ends = [GroupEnd(k[0], (k[1:],), sidecar) for k in keys]
    lane.finish(Ending(keys[0][0], ends, answers))
    return answers.next()
