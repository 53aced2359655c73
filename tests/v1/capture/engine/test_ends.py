# SPDX-License-Identifier: Apache-2.0
"""Requests that end early, or whose consumer fails."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.captured import CapturedEngine, asking, prompt
from tests.support.hf_reference import relative_error
from vllm.v1.capture.types import CaptureResult

pytestmark = pytest.mark.e2e


class Running:
    """A request that the test steps by hand."""

    def __init__(self, engine: CapturedEngine, name: str, prompt_ids: list[int]):
        self.engine, self.name, self.prompt_ids = engine, name, prompt_ids
        self.core: Any = engine.llm.llm_engine
        self.token_ids: list[int] = []
        params = asking("all", max_tokens=20)
        self.core.add_request(name, {"prompt_token_ids": prompt_ids}, params)
        states = self.core.output_processor.request_states
        self.capture_id = next(iter(states.values())).residual.capture_id

    def step(self, times: int) -> None:
        for _ in range(times):
            for output in self.core.step():
                self.token_ids = list(output.outputs[0].token_ids)

    def abort(self) -> CaptureResult:
        self.core.abort_request([self.name])
        output: Any = SimpleNamespace(
            request_id=self.name, capture_id=self.capture_id, capture_results=None
        )
        self.core.capture.wait([output])
        while self.core.has_unfinished_requests():
            self.core.step()
        result: CaptureResult = output.capture_results["keeper"]
        return result

    def check(self, num_rows: int) -> None:
        fed = [*self.prompt_ids, *self.token_ids]
        expected = self.engine.reference.stream(fed)
        rows = self.engine.keeper.rows[self.name, 0]
        sidecars = self.engine.keeper.sidecars[self.name, 0]
        assert len(rows) == 9
        for tap, found in rows.items():
            assert sidecars[tap]["positions"] == list(range(num_rows))
            assert relative_error(found, expected[tap][:num_rows]) < 1e-4


def test_an_abort_while_generating_delivers_the_rows_so_far(
    engine: CapturedEngine,
) -> None:
    request = Running(engine, "abort-decode", prompt(10, seed=200))
    request.step(5)
    result = request.abort()
    assert result.status == "ok"
    assert 2 <= len(request.token_ids) < 20
    request.check(10 + len(request.token_ids) - 1)


def test_an_abort_while_the_prompt_is_computed_says_what_is_there(
    engine: CapturedEngine,
) -> None:
    request = Running(engine, "abort-prefill", prompt(100, seed=201))
    request.step(2)
    result = request.abort()
    assert result.status == "partial_error"
    assert result.error is not None
    num_rows = int(result.error.split("after ")[1].split(" of 100 rows")[0])
    assert 24 <= num_rows < 100
    request.check(num_rows)


def test_an_abort_before_the_first_step_is_an_error(engine: CapturedEngine) -> None:
    request = Running(engine, "abort-waiting", prompt(10, seed=202))
    result = request.abort()
    assert result.status == "error"
    assert "before any of its rows was computed" in (result.error or "")


BAD: list[tuple[Any, str]] = [
    ({"nobody": {}}, "nobody.*keeper"),
    ({"keeper": {"hooks": {"post_block": [0]}, "positions": [99]}}, "max_tokens.*99"),
]


@pytest.mark.parametrize("capture, message", BAD)
def test_a_bad_capture_is_refused_and_nothing_is_scheduled(
    engine: CapturedEngine, capture: Any, message: str
) -> None:
    good, bad = asking("all", max_tokens=3), asking("all", max_tokens=3)
    bad.capture = capture
    with pytest.raises(ValueError, match=message):
        engine.run([prompt(5, seed=205), prompt(5, seed=206)], [good, bad])
    assert not engine.llm.llm_engine.has_unfinished_requests()
    (output,) = engine.run([prompt(5, seed=207)], good)
    engine.check(output)


def test_nothing_is_left_of_requests_that_have_ended(engine: CapturedEngine) -> None:
    engine.run([prompt(5, seed=208)] * 3, asking("all", max_tokens=3))
    core: Any = engine.llm.llm_engine
    runner = core.model_executor.driver_worker.worker.model_runner
    capture = runner.residual._capture
    assert capture._placement._groups == {}
    assert capture._dispatcher._unsent == []
    assert capture._dispatcher._thread.requests == {}
    assert not capture._staging.ring._taken


def test_a_caller_that_steps_the_engine_gets_results(
    engine: CapturedEngine,
) -> None:
    core: Any = engine.llm.llm_engine
    params = asking([0], hooks={"post_block": [1]}, max_tokens=3)
    core.add_request("by-hand", {"prompt_token_ids": prompt(5, seed=3)}, params)
    outputs: list[Any] = []
    while core.has_unfinished_requests():
        outputs += core.step()
    assert [output.capture_results for output in outputs[:-1]] == [None, None]
    final = outputs[-1]
    assert final.capture_results["keeper"].status in ("pending", "ok")
    core.capture.wait([final])
    assert final.capture_results["keeper"].status == "ok"
