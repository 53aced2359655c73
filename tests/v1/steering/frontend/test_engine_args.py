# SPDX-License-Identifier: Apache-2.0
import argparse
from typing import Any

import pytest
from pydantic import TypeAdapter

from tests.v1.steering.frontend._arguments import steering_arguments
from vllm.config.steering import SteeringConfig
from vllm.entrypoints.serve.steering.authority import may_change, steering_keys
from vllm.v1.residual.frontend.options import add_options
from vllm.v1.steering.errors import SteeringValidationError
from vllm.v1.steering.frontend import engine_args
from vllm.v1.steering.frontend.engine_args import API_KEY_VARIABLE, steering_config


def config(*arguments: str) -> Any:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return steering_config(parser.parse_args(arguments))  # type: ignore[arg-type]


def test_nothing_given_is_off() -> None:
    off = config()
    assert not off.enabled and off.max_configs == 4 and not off.modules


def test_every_option_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, "key-c")
    on = config(
        *("--enable-steering", "--max-steering-configs", "9"),
        *("--steering-modules", "a=1.json", "b=x=y.json", "--steering-modules", "c=2"),
        *("--steering-api-key", "key-a", "--steering-api-key", "key-b"),
    )
    assert on.enabled and on.num_rows == 21
    assert on.modules == {"a": "1.json", "b": "x=y.json", "c": "2"}
    dumped = repr(TypeAdapter(SteeringConfig).dump_python(on))
    assert not any(key in dumped + repr(on) for key in ("key-a", "key-b", "key-c"))


def test_modules_may_be_a_mapping() -> None:
    arguments = steering_arguments(steering_modules={"a": "1.json"})
    assert steering_config(arguments).modules == {"a": "1.json"}


def test_modules_may_be_the_object_of_a_configuration_file() -> None:
    on = config("--enable-steering", "--steering-modules", '{"a": "1.json"}')
    assert on.modules == {"a": "1.json"}


def test_a_key_without_its_list_is_one_key() -> None:
    arguments = steering_arguments(steering_api_key="abc")
    assert steering_config(arguments).enabled
    keys = steering_keys(arguments)
    assert may_change(keys, "Bearer abc") and not may_change(keys, "Bearer a")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--enable-steering", "--steering-modules", "{a}"], "an object of names"),
        (["--enable-steering", "--steering-modules", '{"a": 1}'], "NAME=PATH"),
        (["--steering-modules", "a=b"], "--enable-steering"),
        (["--steering-api-key", "a"], "--enable-steering"),
        (["--enable-steering", "--max-steering-configs", "0"], "at least 1"),
        (["--max-dynamic-steering-configs", "2"], "needs --enable-steering"),
        (["--enable-steering", "--steering-modules", "a"], "NAME=PATH"),
        (["--enable-steering", "--steering-modules", "a=1", "a=2"], "given twice"),
        (["--enable-steering", "--steering-api-key", " "], "empty"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], said: str) -> None:
    with pytest.raises(SteeringValidationError, match=said):
        config(*arguments)


def test_a_cpu_without_the_native_library_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_args, "library", lambda: None)
    assert not config().enabled
    with pytest.raises(SteeringValidationError, match="install a C..20 compiler"):
        config("--enable-steering")
    monkeypatch.setattr(engine_args.current_platform, "is_cpu", lambda: False)
    assert config("--enable-steering").enabled


def test_engines_that_join_later_are_refused() -> None:
    arguments = steering_arguments(enable_elastic_ep=True)
    with pytest.raises(SteeringValidationError, match="--enable-elastic-ep"):
        steering_config(arguments)
    arguments.enable_steering = False
    assert not steering_config(arguments).enabled


def test_what_changes_the_graph_changes_the_hash() -> None:
    hashes = {
        config().compute_hash(),
        config("--enable-steering").compute_hash(),
        config("--enable-steering", "--max-steering-configs", "5").compute_hash(),
    }
    assert len(hashes) == 3
    named = config("--enable-steering", "--steering-modules", "a=1")
    assert named.compute_hash() == config("--enable-steering").compute_hash()


def test_the_front_end_that_drops_the_fields_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(SteeringValidationError, match="Rust front end"):
        config("--enable-steering")
    assert not config().enabled


def test_options_for_what_is_always_there_are_taken_where_it_is() -> None:
    sites = ("--declarative-probe-sites", "15:post_block")
    given = ("--enable-declarative-gates", "--enable-row-monitor", *sites)
    assert config("--enable-steering", *given) == config("--enable-steering")
    with pytest.raises(
        ValueError, match="--enable-declarative-gates needs --enable-st"
    ):
        config(*given)
