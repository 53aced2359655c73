# SPDX-License-Identifier: Apache-2.0
"""Creates the capture front end for upstream's offline and async engines."""

import asyncio
import weakref
from concurrent.futures import Future, wait
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any
from uuid import uuid1

from vllm.logger import init_logger
from vllm.v1.capture.core.engine import end_captures_now
from vllm.v1.capture.engine_args import ready_instances
from vllm.v1.capture.frontend.admission import Admission, ReadoutPlanner
from vllm.v1.capture.frontend.disabled import NO_CAPTURE, NoCapture
from vllm.v1.capture.frontend.frontend import CaptureFrontend
from vllm.v1.capture.frontend.streaming import LiveRows
from vllm.v1.capture.registry import build_consumer, check_folders
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.residual.capture_plan import CaptureEnd

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine

logger = init_logger(__name__)


def open_capture(
    engine: "LLMEngine | AsyncLLM", readouts: ReadoutPlanner, offline: bool
) -> NoCapture:
    """The front end of an engine.

    Args:
        engine: the engine.
        readouts: plans the readouts of its requests.
        offline: whether it is an `LLMEngine`, whose core may run in this process; the
            core of an `AsyncLLM` runs in other ones.

    """
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
    admission = Admission(engine.vllm_config, consumers, points, readouts)
    check_folders(admission.capabilities)
    offline_engine: Any = engine if offline else None
    resources = getattr(engine.engine_core, "resources", None)
    frontend = CaptureFrontend(
        engine.vllm_config,
        admission,
        (_Sender if offline else _AsyncSender)(engine.engine_core),
        LiveRows({} if offline else admission.capabilities),
        lambda: not getattr(resources, "engine_dead", False),
        offline_engine,
    )
    weakref.finalize(engine, frontend.close)
    return frontend


class _Unanswered:
    """What was sent to an engine core that has not answered yet."""

    def __init__(self, core: Any) -> None:
        self._core = core
        # The event loop keeps only weak references to tasks.
        self._sending: set[Any] = set()

    def _started(self, sending: "asyncio.Task[Any] | Future[Any]") -> None:
        self._sending.add(sending)
        sending.add_done_callback(self._answered)

    def _answered(self, sent: "asyncio.Task[Any] | Future[Any]") -> None:
        self._sending.discard(sent)
        if not sent.cancelled() and sent.exception() is not None:
            logger.error("The end of captures was not sent: %s", sent.exception())


class _Sender(_Unanswered):
    """Sends ends from the thread that runs an offline engine.

    A core in another process is not waited for: it answers between two steps, and has
    the outputs of the next one by then.
    """

    def __call__(self, ends: list[CaptureEnd]) -> None:
        if not hasattr(self._core, "call_utility"):
            end_captures_now(self._core.engine_core, ends)
            return
        # As `call_utility` does, which would wait for the answer.
        number, sending = uuid1().int >> 64, Future[Any]()
        self._core.utility_results[number] = sending
        self._started(sending)
        request = 0, number, "end_captures", (ends,)
        self._core._send_input(EngineCoreRequestType.UTILITY, request)

    def wait(self, timeout: float) -> None:
        """Wait for what was sent to have arrived."""
        wait(list(self._sending), timeout)


class _AsyncSender(_Unanswered):
    """Sends ends from the event loop's thread, without blocking it."""

    def __call__(self, ends: list[CaptureEnd]) -> None:
        sending = self._core.call_utility_async("end_captures", ends)
        self._started(asyncio.ensure_future(sending))

    def wait(self, timeout: float) -> None:
        """Wait for pending tasks; on the loop's own thread, which runs them, return."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            deadline = monotonic() + timeout
            while self._sending and monotonic() < deadline:
                sleep(0.01)
