# SPDX-License-Identifier: Apache-2.0
"""Creates the capture front end for upstream's offline and async engines."""

import asyncio
import weakref
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.capture.core.engine import end_captures_now
from vllm.v1.capture.engine_args import ready_instances
from vllm.v1.capture.frontend.admission import Admission
from vllm.v1.capture.frontend.disabled import NO_CAPTURE, NoCapture
from vllm.v1.capture.frontend.frontend import CaptureFrontend
from vllm.v1.capture.frontend.request_ends import EndsSender
from vllm.v1.capture.frontend.streaming import LiveRows
from vllm.v1.capture.plan import CaptureEnd
from vllm.v1.capture.registry import build_consumer, check_folders

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine

logger = init_logger(__name__)


def open_for_engine(engine: "LLMEngine") -> NoCapture:
    """The front end for an `LLMEngine`, whose core may run in this process."""
    return _open(engine, _Sender(engine.engine_core), offline=engine)


def open_for_async_engine(engine: "AsyncLLM") -> NoCapture:
    """The front end for an `AsyncLLM`, whose core runs in other processes."""
    return _open(engine, _AsyncSender(engine.engine_core))


def _open(
    engine: "LLMEngine | AsyncLLM",
    send: EndsSender,
    offline: "LLMEngine | None" = None,
) -> NoCapture:
    config = engine.vllm_config.capture_config
    if not config.enabled:
        return NO_CAPTURE
    consumers = {
        entry.instance_name: build_consumer(entry, engine.vllm_config)
        for entry in config.consumers
    }
    consumers.update(ready_instances(config))
    points = {
        layer: tuple(names) for layer, names in (config.hook_points or {}).items()
    }
    admission = Admission(engine.vllm_config, consumers, points)
    check_folders(admission.capabilities)
    resources = getattr(engine.engine_core, "resources", None)
    frontend = CaptureFrontend(
        engine.vllm_config,
        admission,
        send,
        LiveRows(admission.capabilities if offline is None else {}),
        lambda: not getattr(resources, "engine_dead", False),
        offline,
    )
    engine.input_processor.capture = frontend
    engine.output_processor.capture = frontend
    weakref.finalize(engine, frontend.close)
    return frontend


class _Sender:
    """Sends ends synchronously: the engine has them when the call returns."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def __call__(self, ends: list[CaptureEnd]) -> None:
        if hasattr(self._core, "call_utility"):
            self._core.call_utility("end_captures", ends)
        else:
            end_captures_now(self._core.engine_core, ends)

    def wait(self, timeout: float) -> None:
        """Return at once: nothing is pending."""


class _AsyncSender:
    """Sends ends from the event loop's thread, without blocking it."""

    def __init__(self, core: Any) -> None:
        self._core = core
        # The event loop keeps only weak references to tasks.
        self._sending: set[asyncio.Task[Any]] = set()

    def __call__(self, ends: list[CaptureEnd]) -> None:
        sending = self._core.call_utility_async("end_captures", ends)
        task = asyncio.ensure_future(sending)
        self._sending.add(task)
        task.add_done_callback(self._sent)

    def wait(self, timeout: float) -> None:
        """Wait for pending tasks; on the loop's own thread, which runs them, return."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            deadline = monotonic() + timeout
            while self._sending and monotonic() < deadline:
                sleep(0.01)

    def _sent(self, task: "asyncio.Task[Any]") -> None:
        self._sending.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("The end of captures was not sent: %s", task.exception())
