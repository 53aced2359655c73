# SPDX-License-Identifier: Apache-2.0
import asyncio
from types import SimpleNamespace
from typing import Any

from vllm.v1.capture.frontend.frontend import CaptureFrontend
from vllm.v1.capture.frontend.path_locks import PathLocks
from vllm.v1.capture.frontend.request_tracker import RequestTracker, ResultWaiter
from vllm.v1.capture.types import CaptureResult


def closable(offline: bool) -> tuple[CaptureFrontend, list[str]]:
    """A front end that only closes, and the parts that it has closed."""
    calls: list[str] = []
    capture = CaptureFrontend.__new__(CaptureFrontend)
    parts: dict[str, Any] = {
        "_closed": False,
        "_offline": offline,
        "_ends": SimpleNamespace(settle=lambda: calls.append("ends")),
        "_drivers": SimpleNamespace(close=lambda timeout: calls.append("drivers")),
        "_inbox": SimpleNamespace(close=lambda: calls.append("inbox")),
    }
    vars(capture).update(parts)
    return capture, calls


def test_consumers_are_shut_down_once_although_the_engine_is_closed_again() -> None:
    """Its finalizer closes it while the interpreter ends, when no thread can start.

    A server whose engine had died waited forever for one.
    """
    capture, calls = closable(offline=False)
    capture.close()
    capture.close()
    assert calls == ["drivers", "inbox"]


def test_an_offline_engine_that_closes_waits_for_the_ends_it_has_sent() -> None:
    capture, calls = closable(offline=True)
    capture.close()
    assert calls == ["ends", "drivers", "inbox"]


def test_results_that_were_pending_can_be_waited_for_once() -> None:
    requests = RequestTracker(PathLocks({}), 1, lambda *_: None)
    capture = CaptureFrontend.__new__(CaptureFrontend)
    capture._requests = requests
    capture._awaited = ResultWaiter(requests, alive=lambda: True)
    with requests.lock:
        requests.begin("r-1", 0, "r-1", ("files",)).client_id = "r"

    wait = capture.wait_for_results

    async def waits() -> None:
        assert await wait("another", None) is None
        assert await wait("r", 0.01) is None
        waiting = asyncio.create_task(wait("r", 30))
        await asyncio.sleep(0)
        requests.note("r-1", "files", 0, CaptureResult(("r-1", -1, "*"), "ok", None, 7))
        results = await waiting
        assert results is not None
        assert results["files"].status == "ok" and results["files"].payload == 7
        assert await wait("r", None) is None  # They are forgotten.

    asyncio.run(waits())
