# SPDX-License-Identifier: Apache-2.0
"""A misbehaving plug-in affects its own results only."""

import json
import logging
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.v1.capture.consumers._drive import context, deliver, rows_of
from vllm.v1.capture.capabilities import step_capabilities
from vllm.v1.capture.consumer import CaptureConsumer
from vllm.v1.capture.delivery import consumer_thread
from vllm.v1.capture.delivery.consumer_thread import SinkLane
from vllm.v1.capture.errors import CaptureValidationError
from vllm.v1.capture.frontend.admission import Admission
from vllm.v1.capture.frontend.http import as_json
from vllm.v1.capture.registry import as_sink
from vllm.v1.readouts.worker.jobs import Job
from vllm.v1.residual.plain_data import fault_of
from vllm.v1.residual.plugin_errors import Failures, is_interrupt
from vllm.v1.worker.step_consumers import StepConsumers

ROWS = {(0, "post_block"): rows_of(2, 4, 0, torch.float32)}


class Giving(CaptureConsumer):
    """Returns a payload, or raises."""

    def __init__(self, payload: Any = None, error: BaseException | None = None) -> None:
        self.payload, self.error = payload, error

    def on_capture(self, key: Any, tensor: Any, sidecar: Any) -> Any:
        if self.error is not None:
            raise self.error
        return self.payload


def cyclic() -> Any:
    payload: dict[str, Any] = {"a": [1]}
    payload["a"].append(payload)
    return payload


def deep(levels: int) -> Any:
    payload: Any = 1
    for _ in range(levels):
        payload = [payload]
    return payload


def laughing() -> Any:
    payload: Any = ["ha"] * 10
    for _ in range(40):
        payload = [payload] * 10
    return payload


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (cyclic(), "contains itself"),
        (deep(5000), "contains itself"),
        (laughing(), "lists and objects"),
        ({"n": 10**5000}, "64 bits"),
        ([2**64], "64 bits"),
    ],
)
def test_a_payload_that_cannot_travel_is_an_error(payload: Any, said: str) -> None:
    consumer = as_sink(Giving(payload))
    results = deliver(consumer, {"a": ROWS, "b": ROWS})
    for result in results.values():
        assert result.status == "error" and said in str(result.error)
        json.dumps(as_json({"giving": result}))


@pytest.mark.parametrize("payload", [deep(20), {"n": 2**63}, [None, {"a": (1, 2)}]])
def test_a_payload_that_is_plain_travels(payload: Any) -> None:
    assert fault_of(payload) is None
    (result,) = deliver(as_sink(Giving(payload)), {"a": ROWS}).values()
    assert result.status == "ok"
    json.dumps(as_json({"giving": result}))


class Unwritable:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


def test_a_payload_without_a_text_is_named_by_its_class() -> None:
    (result,) = deliver(as_sink(Giving(Unwritable())), {"a": ROWS}).values()
    told = as_json({"giving": result})["giving"]
    assert told["payload"] == "<Unwritable>"


class Leaving:
    """Raises SystemExit for a request's spec."""

    location = "driver"
    reads_client_spec = True

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def validate_client_spec(self, raw: Any, ctx: Any) -> Any:
        raise self.error


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), RuntimeError("no")]
)
def test_what_raises_on_the_engines_thread_does_not_end_the_engine(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in a server, whose engine handles SIGINT.
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_IGN)
    nothing: Any = None
    consumer = SimpleNamespace(on_step=raising(error), shutdown=raising(error))
    steps = object.__new__(StepConsumers)
    steps._consumers, steps._complained, steps._prompts = (
        {"leaving": consumer},
        set(),
        {},
    )
    steps._can = {"leaving": step_capabilities(consumer)}
    steps._step, steps._steering = 0, None
    steps._stats = {"leaving": Counter()}
    steps.on_rows([(Job(nothing, [entry("leaving")]), torch.zeros(2, 4))], 0)
    steps.close()
    assert steps._stats["leaving"]["steps"] == 1


def test_a_users_interrupt_is_no_error_of_a_plugin() -> None:
    # A shell that starts a program in the background makes it ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert is_interrupt(KeyboardInterrupt())
        assert not is_interrupt(SystemExit())
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert not is_interrupt(KeyboardInterrupt())
    finally:
        signal.signal(signal.SIGINT, before)


def raising(error: BaseException) -> Any:
    def called(*_: Any, **__: Any) -> None:
        raise error

    return called


def entry(name: str) -> Any:
    """Two tokens of a request with a readout of one hook point."""
    readout = SimpleNamespace(
        module=name, name=name, taps=((0, "post_block"),), params="", code=b""
    )
    return SimpleNamespace(req_id="r", readout=readout, start=0, count=2, first=0)


@pytest.mark.parametrize(
    "error", [SystemExit(1), GeneratorExit(), ValueError("x" * 10**6)]
)
def test_a_spec_that_makes_a_plugin_leave_is_refused(error: BaseException) -> None:
    admission = object.__new__(Admission)
    admission.consumers = {"leaving": Leaving(error)}
    admission._global_specs = {}
    with pytest.raises(CaptureValidationError) as refused:
        admission._specs({"leaving": {"hooks": {}}}, context())
    assert type(error) in (type(refused.value.__cause__),)
    assert len(str(refused.value)) < 3000


@pytest.fixture
def logged() -> Iterator[list[logging.LogRecord]]:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.v1.residual.plugin_errors")
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


def test_an_error_is_logged_with_its_traceback_once_per_kind(
    logged: list[logging.LogRecord],
) -> None:
    failures = Failures()

    def fail(where: int, error: BaseException) -> None:
        try:
            if where == 0:
                raise error
            raise error
        except BaseException as raised:
            failures.log("mine", "a key", raised)

    for _ in range(3):
        fail(0, ValueError("one"))
        fail(1, ValueError("two"))
        fail(1, SystemExit("three"))
    assert [record.exc_info is not None for record in logged] == [True] * 3 + [
        False
    ] * 6


def test_a_consumer_that_raises_is_logged_at_the_server(
    logged: list[logging.LogRecord],
) -> None:
    (result,) = deliver(
        as_sink(Giving(error=ZeroDivisionError("mine"))), {"a": ROWS}
    ).values()
    assert result.status == "error" and "ZeroDivisionError: mine" in str(result.error)
    (record,) = logged
    assert record.exc_info is not None and "Giving" in record.getMessage()


class Hanging:
    """Does not return from its shutdown."""

    location = "driver"

    def __init__(self) -> None:
        self.free = threading.Event()

    def submit_chunk(self, chunk: Any) -> None:
        """Nothing."""

    def submit_finalize(self, finalize: Any) -> None:
        """Nothing."""

    def get_result(self, key: Any) -> None:
        return None

    def shutdown(self, timeout: float) -> None:
        self.free.wait(60)


def test_stopping_takes_the_time_that_is_stated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(consumer_thread, "SHUTDOWN_GRACE", 0.2)
    sink: Any = Hanging()
    lane = SinkLane("hanging", sink, 1 << 20, 16)
    begun = monotonic()
    lane.close(0.5)
    took = monotonic() - begun
    sink.free.set()
    assert took < 30, "it was waited for until it came back"
