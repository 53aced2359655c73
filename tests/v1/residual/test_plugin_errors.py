# SPDX-License-Identifier: Apache-2.0
"""The text of any error can be sent: it is UTF-8, bounded, and never raises."""

import json
from typing import Any

import cloudpickle
import msgspec
import pytest
import torch

from vllm.v1.hooks.plan import HookPlan, HookSpec
from vllm.v1.hooks.results import decode
from vllm.v1.hooks.worker.worker import WorkerHooks
from vllm.v1.readouts.worker.custom import CustomReadouts
from vllm.v1.readouts.worker.jobs import Entry, ReadingRequest
from vllm.v1.residual.plugin_errors import Failures, described, message_of
from vllm.v1.residual.readout_plan import Readout


class Silent(Exception):
    def __str__(self) -> str:
        raise SystemExit("no text")


class NoText(Exception):
    def __str__(self) -> Any:
        return json.loads("5")


class Odd(str):
    __slots__ = ()

    def __getitem__(self, key: Any) -> Any:
        raise RuntimeError("not a text")

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("not a text")

    def __format__(self, spec: str) -> Any:
        raise RuntimeError("not a text")


class Subclassed(Exception):
    def __str__(self) -> str:
        return Odd("its own text")


ERRORS = {
    "surrogate": ValueError("\ud800"),
    "silent": Silent(),
    "no text": NoText(),
    "subclass": Subclassed(),
    "long": ValueError("x" * 100_000),
    "exit": SystemExit("leave"),
}


@pytest.fixture(params=ERRORS)
def error(request: pytest.FixtureRequest) -> BaseException:
    return ERRORS[request.param]


def sent(text: str) -> str:
    """What arrives in another process, and in a response."""
    assert len(text) < 6000
    assert json.loads(json.dumps(text).encode()) == text
    found: str = msgspec.msgpack.decode(msgspec.msgpack.encode(text))
    assert found == text == text.encode().decode()
    return found


def test_every_error_has_a_text_that_can_be_sent(error: BaseException) -> None:
    assert sent(described(error)).startswith(type(error).__name__[:3])
    assert sent(message_of(error)) in described(error)


def test_texts_are_kept_where_there_is_one() -> None:
    assert described(ValueError("at layer 3")) == "ValueError: at layer 3"
    assert described(ERRORS["surrogate"]) == "ValueError: \\ud800"
    assert described(ERRORS["subclass"]) == "Subclassed: its own text"
    assert "not available" in described(ERRORS["silent"])


def test_a_custom_readout_may_raise_anything(error: BaseException) -> None:
    def fail(rows: Any, context: Any) -> Any:
        raise error

    custom = CustomReadouts(None)  # type: ignore[arg-type]
    custom._functions[b"code"] = fail
    readout = Readout("mine", "custom", ((0, "post_block"),), ((0, 9),), code=b"code")
    entry = Entry("a", readout, 0, 1, 0, torch.zeros(1, 1).numpy())
    reading = ReadingRequest((readout,), (), (), 1, {})
    found = custom.compute(entry, 0, torch.zeros(1, 1, 4), reading)
    assert isinstance(found, str)
    sent(found)


def hooks_with(function: Any, pickles: bool = False) -> WorkerHooks:
    """The hooks of a worker with one request."""
    hooks = WorkerHooks(torch.nn.Linear(2, 2), {(0, "post_block"): 7}, True)
    spec = HookSpec("0", (0,), "post_block", code=cloudpickle.dumps(len))
    hooks.add_request("a", HookPlan("plan", (spec,), pickles), 1)
    hooks._requests["a"].running[0].function = function
    return hooks


def errors_of(hooks: WorkerHooks) -> dict[str, str]:
    result = hooks.take("plan")
    assert result is not None
    return decode(result, False).errors


def test_a_function_in_the_forward_pass_may_raise_anything(
    error: BaseException,
) -> None:
    def fail(context: Any, rows: Any) -> Any:
        raise error

    hooks = hooks_with(fail)
    request = hooks._requests["a"]
    hooks._run(request, request.running[0], 0, range(1), torch.zeros(1, 4))
    sent(errors_of(hooks)["0"])


class Unpicklable:
    def __reduce__(self) -> Any:
        raise SystemExit("\ud800")


def test_a_saved_value_may_refuse_to_be_pickled() -> None:
    hooks = hooks_with(None, pickles=True)
    hooks._requests["a"].running[0].saved["it"] = Unpicklable()
    assert "SystemExit" in sent(errors_of(hooks)["saved"])


def test_a_consumers_error_is_logged_whatever_its_text(error: BaseException) -> None:
    Failures().log("mine", "a key", error)
