# SPDX-License-Identifier: Apache-2.0
"""Receipts count each token once, whatever was computed twice or dropped."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm.v1.residual.receipts import Effect, ReceiptPart, StepReceipt
from vllm.v1.steering.receipts import WHEN, Receipt, note_receipt, take_receipt

ADD = Effect(2, "post_attn", "add", "")
CLAMP = Effect(1, "post_block", "clamp", "digest")
PROMPT = 4


def step(start: int, *doses: float, effect: Effect = ADD) -> StepReceipt:
    rows = np.array(doses, dtype=np.float32)[:, None]
    return StepReceipt(start, [ReceiptPart(start, (effect,), rows)])


def request(num_tokens: int = PROMPT) -> Any:
    return SimpleNamespace(num_tokens=num_tokens)


def summed(found: Any, stop: int) -> Any:
    receipt = Receipt(PROMPT)
    receipt.add(take_receipt(found) or [])
    return receipt.as_dict(stop)


def test_tokens_that_are_computed_again_count_once() -> None:
    one = request()
    note_receipt(one, step(0, 1.0, 1.0), 2, [])
    note_receipt(one, step(0, 9.0, 9.0, 3.0), 3, [])  # Preempted, then begun again.
    note_receipt(one, step(3, 5.0), 1, [7])
    (entry,) = summed(one, PROMPT)["applied"]
    assert entry["tokens"] == 4 and entry["dose"] == {"mean": 2.5, "max": 5.0}
    assert take_receipt(one) is None


def test_rejected_drafts_do_not_count_and_later_steps_are_moved() -> None:
    one = request(PROMPT + 1)
    # One token and two drafts, of which one is accepted.
    note_receipt(one, step(4, 1.0, 2.0, 99.0), 1, [7, 8])
    one.num_tokens += 2
    # Prepared as if both had been accepted.
    note_receipt(one, step(7, 6.0), 1, [9])
    (entry,) = summed(one, PROMPT + 4)["applied"]
    assert entry["tokens"] == 3 and entry["dose"] == {"mean": 3.0, "max": 6.0}


def test_tokens_after_the_end_do_not_count() -> None:
    one = request(PROMPT + 1)
    note_receipt(one, step(4, 1.0, 2.0, 3.0), 1, [7, 8, 9])
    (entry,) = summed(one, PROMPT + 2)["applied"]
    assert entry["tokens"] == 2 and entry["dose"]["max"] == 2.0


def test_what_changed_nothing_or_was_not_passed_is_not_a_dose() -> None:
    one = request()
    note_receipt(one, step(0, 0.0, np.nan, 0.5, np.inf, effect=CLAMP), 4, [])
    one.num_tokens += 1
    note_receipt(one, step(4, 0.0), 1, [1])
    clamp, add = summed(one, 5)["applied"]
    assert clamp["op"] == "clamp" and clamp["tokens"] == 2
    assert np.isfinite([*clamp["dose"].values()]).all()
    assert add == {
        "hook": "post_attn",
        "layer": 2,
        "op": "add",
        "tokens": 0,
        "dose": {"mean": 0.0, "max": 0.0},
    }


@pytest.mark.parametrize(
    ("scope", "decided", "tokens", "first"),
    [("token", 5, 3, 1), ("prompt", 1, 1, 3)],
)
def test_firings_are_counted_where_they_decide(
    scope: str, decided: int, tokens: int, first: int
) -> None:
    mood = Effect(0, "post_block", WHEN, "8", "mood", scope)
    other = Effect(0, "post_block", WHEN, "9", "mood", scope)
    one = request()
    note_receipt(one, step(0, 0.2, 0.7, 0.5, 1.0, effect=mood), 4, [])
    one.num_tokens += 1
    note_receipt(one, step(4, 0.9, effect=mood), 1, [1])
    one.num_tokens += 1
    note_receipt(one, step(5, 0.0, effect=other), 1, [1])
    fired = summed(one, 6)["fired"]
    assert list(fired) == ["mood", "mood#2"]
    assert fired["mood"] == {
        "layer": 0,
        "hook": "post_block",
        "scope": scope,
        "decided": decided,
        "tokens": tokens,
        "first": first,
    }
