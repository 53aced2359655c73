# SPDX-License-Identifier: Apache-2.0
"""Checks of consumers and keys under the names of an earlier fork."""

import pytest

from vllm.v1.capture.config import (
    CaptureConsumerSpec,
    expand_graphsafe_keys,
    validate_consumer_specs,
)


def test_keys_stand_for_taps() -> None:
    assert expand_graphsafe_keys(["1:post_block", "1:all"], 3) == [
        (1, "post_attn"),
        (1, "post_block"),
        (1, "pre_attn"),
    ]
    assert expand_graphsafe_keys(["all:mlp_in"], 2) == [(0, "mlp_in"), (1, "mlp_in")]
    assert len(expand_graphsafe_keys(["all:all", "0:pre_attn"], 4)) == 12


@pytest.mark.parametrize("key", ["1", "x:post_block", "1:nowhere", "3:pre_attn", ""])
def test_other_keys_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match=repr(key)):
        expand_graphsafe_keys([key], 3)


def test_consumers_need_different_names() -> None:
    validate_consumer_specs([CaptureConsumerSpec("a"), CaptureConsumerSpec("a", "b")])
    with pytest.raises(ValueError, match="two capture consumers are named 'a'"):
        validate_consumer_specs([CaptureConsumerSpec("a"), CaptureConsumerSpec("a")])
    with pytest.raises(ValueError, match="must have a name"):
        validate_consumer_specs([CaptureConsumerSpec(" ")])
