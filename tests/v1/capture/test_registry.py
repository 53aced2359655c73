# SPDX-License-Identifier: Apache-2.0
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.plugins import install
from tests.v1.capture._sinks import KeepingConsumer, RecordingSink
from vllm.config.capture import ConsumerConfig
from vllm.v1.capture.capabilities import capabilities_of
from vllm.v1.capture.consumer import BatchingSink, CaptureConsumer
from vllm.v1.capture.errors import (
    CaptureValidationError,
    UnknownCaptureConsumerError,
)
from vllm.v1.capture.registry import (
    as_sink,
    build_consumer,
    check_consumer,
    check_folders,
    consumer_class,
    consumer_names,
)

PLUGIN = """
from vllm.v1.capture.consumer import CaptureConsumer

class Good(CaptureConsumer):
    def __init__(self, vllm_config, params):
        if "wrong" in params:
            raise KeyError("wrong is not a parameter")
        self.params = params
    def on_capture(self, key, tensor, sidecar):
        return None

class Nothing:
    location = "worker"

class Moving(Good):
    def __init__(self, vllm_config, params):
        self.location = "driver"
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with consumers, and another one with an equal name."""
    install(
        tmp_path,
        "plug_one",
        PLUGIN,
        good="plug_one:Good",
        nothing="plug_one:Nothing",
        moving="plug_one:Moving",
        absent="no_such_module:X",
        twice="plug_one:Good",
    )
    install(tmp_path, "plug_two", PLUGIN, twice="plug_two:Good")
    for name in ("plug_one", "plug_two"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_the_fork_brings_its_own_consumers() -> None:
    assert {"filesystem", "logging"} <= set(consumer_names())
    for name in ("filesystem", "logging"):
        check_consumer(consumer_class(name), name)


def test_an_installed_package_adds_consumers(plugin: None) -> None:
    assert "good" in consumer_names()
    entry = ConsumerConfig("good", "mine", {"a": 1})
    made = build_consumer(entry, None)  # type: ignore[arg-type]
    assert (made.params, made.instance_name) == ({"a": 1}, "mine")


def test_an_instance_cannot_move(plugin: None) -> None:
    with pytest.raises(CaptureValidationError, match="'worker' and the instance 'dr"):
        build_consumer(ConsumerConfig("moving"), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "error", "why"),
    [
        ("no-such-consumer", UnknownCaptureConsumerError, "filesystem.*logging"),
        ("twice", CaptureValidationError, "several packages"),
        ("absent", CaptureValidationError, "no_such_module"),
        ("nothing", CaptureValidationError, "neither a CaptureConsumer nor"),
    ],
)
def test_a_name_that_gives_no_consumer_is_refused(
    plugin: None, name: str, error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        consumer_class(name)


def test_wrong_parameters_are_refused_by_instance(plugin: None) -> None:
    entry = ConsumerConfig("good", "mine", {"wrong": 1})
    with pytest.raises(CaptureValidationError, match="'mine' rejects its parameters"):
        build_consumer(entry, None)  # type: ignore[arg-type]


def test_instances_that_would_write_each_others_files_are_refused(
    tmp_path: Path,
) -> None:
    (tmp_path / "same").symlink_to(tmp_path)
    made = {
        name: SimpleNamespace(folder=tmp_path / folder)
        for name, folder in {"a": "", "b": "below", "c": "same"}.items()
    }
    made["d"] = SimpleNamespace()
    with pytest.raises(
        CaptureValidationError, match="'a' and 'c' both write to .*same"
    ):
        check_folders(capabilities_of(made))
    del made["a"]
    check_folders(capabilities_of(made))


@pytest.mark.parametrize("name", ["filesystem", "arrow"])
def test_what_stores_rows_says_where(name: str, tmp_path: Path) -> None:
    entry = ConsumerConfig(name, "mine", {"root": str(tmp_path)})
    made = build_consumer(entry, None)  # type: ignore[arg-type]
    assert made.folder == tmp_path


class Unfinished(CaptureConsumer):
    """Leaves `on_capture` out."""


class Demanding(KeepingConsumer):
    required_sidecar_fields = frozenset({"positions", "mood"})


class Pessimist(RecordingSink):
    required_sidecar_fields = frozenset({"capture_error"})


class Elsewhere(RecordingSink):
    location = "moon"  # type: ignore[assignment]


@pytest.mark.parametrize(
    "thing, problem",
    [
        (Unfinished, "does not define on_capture"),
        (Demanding, "\\['mood'\\]"),
        (Pessimist, "\\['capture_error'\\], which requests do not always have"),
        (Elsewhere, "its location is 'moon'"),
        (Elsewhere(), "its location is 'moon'"),
        (object(), "has no submit_chunk, submit_finalize, get_result, shutdown"),
    ],
)
def test_what_is_no_consumer_is_refused_with_the_reason(
    thing: Any, problem: str
) -> None:
    with pytest.raises(CaptureValidationError, match=problem):
        check_consumer(thing, "x")


@pytest.mark.parametrize(
    "thing", [KeepingConsumer, KeepingConsumer(), RecordingSink, RecordingSink()]
)
def test_consumers_and_sinks_are_accepted(thing: Any) -> None:
    check_consumer(thing, "x")


def test_a_sink_is_used_as_it_is_and_a_consumer_batched() -> None:
    sink = RecordingSink()
    assert as_sink(sink) is sink
    assert isinstance(as_sink(KeepingConsumer()), BatchingSink)
