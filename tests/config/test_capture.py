# SPDX-License-Identifier: Apache-2.0
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.config.capture import CaptureConfig, ConsumerConfig, parse_consumer


@pytest.mark.parametrize(
    "text, expected",
    [
        ("logging", ConsumerConfig("logging")),
        ("filesystem:root=/a/b", ConsumerConfig("filesystem", "", {"root": "/a/b"})),
        (
            "filesystem:root=/a,instance_name=second,fsync=true",
            ConsumerConfig("filesystem", "second", {"root": "/a", "fsync": True}),
        ),
        (
            'x:hooks={"post_block":[3,4],"pre_attn":[0]},n=8,list=[1,2]',
            ConsumerConfig(
                "x",
                "",
                {
                    "hooks": {"post_block": [3, 4], "pre_attn": [0]},
                    "n": 8,
                    "list": [1, 2],
                },
            ),
        ),
        ('x:a="1,2",b=2', ConsumerConfig("x", "", {"a": "1,2", "b": 2})),
        (r'x:a="q\",r",b=2', ConsumerConfig("x", "", {"a": 'q",r', "b": 2})),
        (
            "x:url=http://h:1/p?q=2",
            ConsumerConfig("x", "", {"url": "http://h:1/p?q=2"}),
        ),
        (
            '{"name": "x", "instance_name": "y", "params": {"a": 1}}',
            ConsumerConfig("x", "y", {"a": 1}),
        ),
        (
            str({"name": "x", "params": {"a": [True, None]}}),
            ConsumerConfig("x", "", {"a": [True, None]}),
        ),
    ],
)
def test_a_consumer_is_read_as_it_is_written(
    text: str, expected: ConsumerConfig
) -> None:
    assert parse_consumer(text) == expected


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(st.characters(codec="utf-8"), max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=3), inner)
    ),
    max_leaves=6,
)


@given(
    st.dictionaries(st.from_regex("[a-z_]+", fullmatch=True), json_values, max_size=3)
)
def test_values_written_as_json_are_read_back(params: dict[str, Any]) -> None:
    params.pop("instance_name", None)
    written = ",".join(f"{name}={json.dumps(v)}" for name, v in params.items())
    assert parse_consumer(f"x:{written}").params == params


@given(st.text())
def test_whatever_is_written_is_a_consumer_or_a_refusal(text: str) -> None:
    try:
        assert parse_consumer(text).name
    except ValueError as error:
        assert str(error)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (":root=/a", "expected NAME"),
        ("filesystem:root", "'root' is not key=value"),
        ("filesystem:=3", "is not key=value"),
        ("filesystem:root=/a,root=/b", "'root' is given twice"),
        ({"nam": "x"}, "'name', 'instance_name'"),
        ({"name": "x", "parms": {}}, "has the keys"),
        ({"name": 3}, "'name'"),
        ({"name": "x", "params": [1]}, "params"),
    ],
)
def test_a_consumer_that_is_badly_written_is_refused(wrong: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CaptureConfig(consumers=[wrong])


def test_two_instances_of_a_name_need_names_of_their_own() -> None:
    with pytest.raises(ValueError, match="another instance_name"):
        CaptureConfig(consumers=["logging", "logging"])
    config = CaptureConfig(consumers=["logging", "logging:instance_name=b"])
    assert [entry.instance_name for entry in config.consumers] == ["logging", "b"]


@pytest.mark.parametrize(
    "option",
    ["staging_bytes", "dispatch_queue_size", "dispatch_queue_bytes", "spill_max_bytes"],
)
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_must_be_positive(option: str, value: int) -> None:
    with pytest.raises(ValueError, match=option):
        CaptureConfig(**{option: value})


def test_half_of_the_staging_memory_is_for_one_step() -> None:
    assert CaptureConfig(staging_bytes=1000).rows_per_step(100) == 5
    assert CaptureConfig(staging_bytes=1000, readouts=True).rows_per_step(100) == 3


def test_the_compile_cache_knows_whether_taps_are_compiled_in() -> None:
    off, on = CaptureConfig(), CaptureConfig(consumers=["logging"])
    assert not off.enabled and on.enabled
    assert off.compute_hash() != on.compute_hash()
    other = CaptureConfig(consumers=["logging:instance_name=b"])
    assert on.compute_hash() == other.compute_hash()
    # Compiled code checks the size of the staging memory.
    less = CaptureConfig(consumers=["logging"], staging_bytes=1 << 20)
    assert on.compute_hash() != less.compute_hash()
    assert off.compute_hash() == CaptureConfig(staging_bytes=1 << 20).compute_hash()


@pytest.mark.parametrize("text", ['{"name": ', "{name}", "{1: 2}", "{[}"])
def test_what_begins_like_an_object_must_be_one(text: str) -> None:
    with pytest.raises(ValueError, match="capture consumer|--capture-consumers"):
        parse_consumer(text)
