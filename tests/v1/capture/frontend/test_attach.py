# SPDX-License-Identifier: Apache-2.0
from concurrent.futures import Future
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.v1.capture.frontend import ends as module
from vllm.v1.capture.frontend.ends import OfflineEnds
from vllm.v1.residual.capture_plan import CaptureEnd

END = CaptureEnd("r", "ipc://here", [1], 0, "stop", ["inline"])


class Core:
    """A client of an engine core in another process, which answers when told to."""

    def __init__(self) -> None:
        self.utility_results: dict[int, Future[Any]] = {}
        self.sent: list[Any] = []

    def call_utility(self, *args: Any) -> Any:
        raise AssertionError("it would wait for the core")

    def _send_input(self, kind: Any, request: Any) -> None:
        self.sent.append((kind.name, request))

    def answer(self, error: Exception | None = None) -> None:
        for future in self.utility_results.values():
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
        self.utility_results.clear()


def sent_to(core: Any) -> OfflineEnds:
    ends = OfflineEnds(core, "ipc://here")
    ends._noted.append(END)
    ends.flush()
    return ends


def test_ends_are_sent_without_waiting_for_the_core() -> None:
    core = Core()
    ends = sent_to(core)
    ((kind, (client, number, method, args)),) = core.sent
    assert (kind, client, method, args) == ("UTILITY", 0, "end_captures", ([END],))
    assert list(core.utility_results) == [number]
    began = perf_counter()
    ends.settle(0.1)
    assert perf_counter() - began >= 0.1, "nothing has answered"
    core.answer()
    ends.settle(60.0)
    assert perf_counter() - began < 30


def test_an_end_that_the_core_refuses_is_logged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(
        module.logger, "error", lambda text, *args: logged.append(text % args)
    )
    core = Core()
    ends = sent_to(core)
    core.answer(ValueError("no such request"))
    ends.settle(60.0)
    assert logged == ["The end of captures was not sent: no such request"]


def test_a_core_in_this_process_has_them_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    had: list[Any] = []
    monkeypatch.setattr(
        module, "end_captures_now", lambda core, ends: had.append((core, ends))
    )
    core = SimpleNamespace(engine_core="core")
    sent_to(core)
    assert had == [("core", [END])]
