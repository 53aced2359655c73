# SPDX-License-Identifier: Apache-2.0
"""Results for a front end of the same process are handed over by a call."""

from collections.abc import Iterator

import pytest
import torch

from vllm.v1.capture.results import RowsByTap
from vllm.v1.capture.transport.zmq_channel import (
    Inbox,
    Message,
    ResultMessage,
    hand_over,
)
from vllm.v1.capture.types import CaptureResult

TAP = (3, "post_block")


@pytest.fixture
def came() -> list[Message]:
    return []


@pytest.fixture
def inbox(came: list[Message]) -> Iterator[Inbox]:
    opened = Inbox(came.append)
    yield opened
    opened.close()


def message(rows: torch.Tensor) -> ResultMessage:
    payload = RowsByTap()
    facts = {"positions": [4, 5], "token_ids": [7, None], "encoding": "zstd"}
    payload.put(TAP, rows, facts)
    key = ("r", -1, "*")
    return ResultMessage.of("r", "inline", 0, CaptureResult(key, "ok", None, payload))


def test_rows_are_there_when_the_call_returns_without_a_copy(
    inbox: Inbox, came: list[Message]
) -> None:
    rows = torch.randn(2, 8)
    assert hand_over(inbox.address, message(rows))
    (found,) = came
    assert isinstance(found, ResultMessage)
    payload = found.result().payload
    assert payload[TAP].data_ptr() == rows.data_ptr()
    assert payload.facts_of(TAP) == {
        "positions": [4, 5],
        "token_ids": [7, None],
        "encoding": "zstd",
        "transport": "http",
        "heads": [],
    }


def test_other_addresses_are_left_to_the_channel(
    inbox: Inbox, came: list[Message]
) -> None:
    assert not hand_over(inbox.address + "-other", message(torch.zeros(2, 8)))
    inbox.close()
    assert not hand_over(inbox.address, message(torch.zeros(2, 8)))
    bounded = Inbox(came.append, bounded=True)
    assert not hand_over(bounded.address, message(torch.zeros(2, 8)))
    bounded.close()
    assert came == []


def test_a_front_end_that_fails_does_not_fail_the_worker() -> None:
    def refuse(_: Message) -> None:
        raise RuntimeError("out of order")

    inbox = Inbox(refuse)
    assert hand_over(inbox.address, message(torch.zeros(2, 8)))
    inbox.close()
