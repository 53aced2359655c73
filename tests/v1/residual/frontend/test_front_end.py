# SPDX-License-Identifier: Apache-2.0
import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.output_processor import OutputProcessor, RequestState
from vllm.v1.residual import nonfinite_streams
from vllm.v1.residual.frontend.front_end import NO_FRONT_END, NO_RESULTS, FrontEnd
from vllm.v1.steering.core import refusals


class Noted:
    """A front end of one feature that notes its calls."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self._name, self._calls = name, calls

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **named: self._calls.append(f"{self._name}.{name}")


@pytest.mark.parametrize(
    "owner", [AsyncLLM, InputProcessor, LLMEngine, OutputProcessor]
)
def test_objects_made_without_their_constructor_have_the_null_object(
    owner: Any,
) -> None:
    assert owner.__new__(owner).residual is NO_FRONT_END
    assert RequestState.__new__(RequestState).residual is NO_RESULTS


def test_an_engine_that_never_started_can_be_shut_down() -> None:
    engine = AsyncLLM.__new__(AsyncLLM)
    engine.shutdown()


def test_capture_admits_last_because_it_reserves() -> None:
    calls: list[str] = []
    front: Any = FrontEnd(Noted("capture", calls))  # type: ignore[arg-type]
    front.steering = Noted("steering", calls)
    front.admit("r", SamplingParams(), 3)
    assert calls == ["steering.admit", "capture.admit"]


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("capture", {"inline": {"hooks": {}}}, "--capture-consumers"),
        ("readouts", {"n": {"kind": "norm", "layers": [0]}}, "--enable-readouts"),
        ("steering_vectors", {"pre_attn": {0: [1.0]}}, "--enable-steering"),
    ],
)
def test_with_all_features_off_requests_for_them_are_refused(
    name: str, value: Any, remedy: str
) -> None:
    params = SamplingParams(**{name: value})
    with pytest.raises(VLLMValidationError, match=remedy) as refused:
        NO_FRONT_END.admit("r", params, 3)
    assert refused.value.parameter == name
    assert str(refused.value.value) == str(value)
    plain = SamplingParams()
    NO_FRONT_END.admit("r", plain, 3)
    assert asyncio.run(NO_FRONT_END.prepare(plain)) is plain


def test_only_outputs_with_results_or_an_error_are_completed() -> None:
    def output(reason: str | None = None, **own: Any) -> Any:
        named = {"capture_id": None, "hooks_key": None, **own}
        return SimpleNamespace(outputs=[SimpleNamespace(finish_reason=reason)], **named)

    concerns = NO_FRONT_END.concerns
    assert not concerns(output()) and not concerns(output("stop"))
    assert concerns(output("error")) and concerns(output(capture_id="r"))
    assert concerns(output(hooks_key="r"))


def test_the_engine_core_is_told_of_a_stop_after_captures_have_settled() -> None:
    calls: list[str] = []
    front = FrontEnd(Noted("capture", calls))  # type: ignore[arg-type]
    core = SimpleNamespace(stopping=False)
    front.settle(core)
    front.settle(None)
    assert core.stopping and calls == ["capture.settle"] * 2


@pytest.mark.parametrize(
    ("reason", "error", "text"),
    [
        ("steering failed: ValueError: x", GracefulHTTPError, "steering failed: Value"),
        (nonfinite_streams.MARK + "at 1", VLLMValidationError, "prompt: .* at 1. The"),
        (refusals.MARK + "y", VLLMValidationError, "steering_vectors: y"),
        (None, None, ""),
    ],
)
def test_the_reason_of_an_error_reaches_the_client(
    reason: str | None, error: Any, text: str
) -> None:
    calls: list[str] = []
    front: Any = FrontEnd(Noted("capture", calls))  # type: ignore[arg-type]

    class Engine:
        async def abort(self, request_id: str, internal: bool) -> None:
            calls.append("abort")

    output: Any = SimpleNamespace(
        outputs=[SimpleNamespace(finish_reason="error", stop_reason=reason)],
        capture_id=None,
        hooks_key=None,
    )
    told = front.complete(Engine(), "r", output, SamplingParams())
    if error is None:  # Upstream's own, which has no text.
        asyncio.run(told)
        return
    with pytest.raises(error, match=text) as found:
        asyncio.run(told)
    assert calls == ["abort", "capture.refused"]
    assert getattr(found.value, "http_status", 500) == 500
