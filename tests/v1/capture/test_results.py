# SPDX-License-Identifier: Apache-2.0
import sys
from typing import Any

import pytest
import torch

from tests.v1.capture._sinks import key
from vllm.v1.capture.results import RowsByTap, join_payloads, merge, merge_samples
from vllm.v1.capture.types import CaptureResult


def of(status: Any, error: str | None = None, payload: Any = None) -> CaptureResult:
    return CaptureResult(key(), status, error, payload)


@pytest.mark.parametrize(
    "statuses, merged",
    [
        (["ok", "ok"], "ok"),
        (["error", "error"], "error"),
        (["ok", "error"], "partial_error"),
        (["ok", "partial_error"], "partial_error"),
        (["error", "partial_error"], "partial_error"),
        (["ok", "error", "pending"], "pending"),
        (["ok", "not_requested"], "ok"),
        (["not_requested"], "not_requested"),
    ],
)
def test_the_status_of_several_results(statuses: list[str], merged: str) -> None:
    assert merge("r", [of(status) for status in statuses]).status == merged


def test_every_distinct_error_is_named_once() -> None:
    result = merge("r", [of("error", "b"), of("error", "a"), of("error", "b")])
    assert result.error == "a; b"
    assert result.key == ("r", -1, "*")


@pytest.mark.parametrize(
    "payloads, joined",
    [
        ([None, None], None),
        ([["a"], ["b", "c"]], ["a", "b", "c"]),
        ([["a"], None], ["a"]),
        ([{"a": 1}, {"b": 2}], {"a": 1, "b": 2}),
        (["line"], "line"),
        (["one", "two"], ["one", "two"]),
    ],
)
def test_payloads_are_joined_by_their_kind(payloads: list[Any], joined: Any) -> None:
    assert join_payloads(payloads) == joined


def test_the_payload_of_several_samples_is_by_sample() -> None:
    result = merge_samples("r", {0: of("ok", payload=["x"]), 1: of("error", "bad")})
    assert result.payload == {0: ["x"], 1: None}
    assert (result.status, result.error) == ("partial_error", "bad")


def test_taps_are_in_order_however_their_groups_arrive() -> None:
    rows = RowsByTap()
    facts = {"positions": [0], "token_ids": [5]}
    for layers in ((0, 10), (9, 2), (1,)):  # Two consumers make several groups.
        taps = [(layer, "post_block") for layer in layers]
        rows.put_all(taps, torch.tensor([[[layer]] for layer in layers]), facts)
    for held in (rows, rows.positions, rows.token_ids):
        assert [layer for layer, _ in held] == [0, 1, 2, 9, 10]
    assert [one.item() for one in rows.values()] == [0, 1, 2, 9, 10]


def test_rows_by_tap_are_shown_by_their_shapes() -> None:
    rows = RowsByTap()
    facts = {"positions": [0, 1], "token_ids": [5, 6]}
    for layer in range(6):
        rows.put((layer, "post_block"), torch.zeros(2, 3, dtype=torch.bfloat16), facts)
    shown = repr(rows)
    assert shown.startswith("RowsByTap((0, 'post_block'): [2, 3] bfloat16, ")
    assert shown.endswith("... 6 taps)") and len(shown) < 250
    with pytest.raises(KeyError, match=r"\(9, 'x'\) is not in RowsByTap.*6 taps"):
        rows[9, "x"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_in_a_notebook_are_the_clients_map_of_norms(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    rows = RowsByTap()
    facts = {"positions": [0, 3], "token_ids": [5, None]}
    rows.put((2, "post_block"), torch.tensor([[3.0, 4.0], [0, 0.5]]).to(dtype), facts)
    shown = of("partial_error", "no <disk>", rows)._repr_html_()
    assert shown is not None and "partial_error: no &lt;disk&gt;" in shown
    assert "2 post_block" in shown and "position 0 #5: 5<" in shown
    assert "position 3 : 0.5<" in shown
    heads = RowsByTap()
    heads.put((2, "z"), torch.zeros(2, 4, dtype=dtype), {**facts, "heads": [7, 2]})
    assert "position 0 #5, heads [7, 2]: 0<" in (heads._repr_html_() or "")
    assert of("ok", payload={"path": "file"})._repr_html_() is None
    monkeypatch.setitem(sys.modules, "clearbox_client.rows", None)
    assert rows._repr_html_() is None and of("ok", payload=rows)._repr_html_() is None
