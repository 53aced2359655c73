# SPDX-License-Identifier: Apache-2.0
"""Results for a front end of the same process are handed over by a call."""

from collections.abc import Iterator

import pytest
import torch

from vllm.v1.capture.results import GroupedRows
from vllm.v1.capture.transport.zmq_channel import (
    INBOXES,
    Inbox,
    Message,
    ResultMessage,
)

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
    facts = {"positions": [4, 5], "token_ids": [7, None]}
    payload = GroupedRows([((TAP,), rows[None], facts)])
    return ResultMessage("r", "inline", 0, "ok", None, payload)


def test_rows_are_there_when_the_call_returns_without_a_copy(
    inbox: Inbox, came: list[Message]
) -> None:
    rows = torch.randn(2, 8)
    INBOXES[inbox.address](message(rows))
    (found,) = came
    assert isinstance(found, ResultMessage)
    payload = found.result().payload
    assert payload[TAP].data_ptr() == rows.data_ptr()
    assert payload.facts_of(TAP) == {
        "positions": [4, 5],
        "token_ids": [7, None],
        "transport": "http",
        "heads": [],
    }


def test_only_open_unbounded_inboxes_are_known_in_the_process(
    inbox: Inbox, came: list[Message]
) -> None:
    assert inbox.address in INBOXES
    inbox.close()
    assert inbox.address not in INBOXES
    bounded = Inbox(came.append, bounded=True)
    assert bounded.address not in INBOXES
    bounded.close()
