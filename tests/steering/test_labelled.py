# SPDX-License-Identifier: Apache-2.0
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.steering.labelled import Columns, Labelled, held_out, read_labelled
from vllm.v1.readouts.errors import ReadoutValidationError
from vllm.v1.steering.errors import SteeringValidationError

CHAT = {"role": "user", "content": "a"}
PATH = Path("data.jsonl")


def read(entries: list[Any], **chosen: Any) -> Labelled:
    columns = Columns(texts=("prompt", "text"), **chosen)
    records = [(f"line {i}", entry) for i, entry in enumerate(entries, 1)]
    return read_labelled(records, PATH, columns)


def test_each_class_is_held_out_alike() -> None:
    labels = np.array([True] * 40 + [False] * 8)
    data = Labelled([], labels, None)
    test = held_out(data, 0.25, 1)
    assert (test[labels].sum(), test[~labels].sum()) == (10, 2)
    assert (held_out(data, 0.25, 1) == test).all()


@given(
    groups=st.lists(st.integers(0, 9), min_size=4, max_size=60),
    share=st.floats(0.05, 0.6),
    seed=st.integers(0, 99),
)
def test_groups_are_held_out_whole(groups: list[int], share: float, seed: int) -> None:
    names = [str(group) for group in groups for _ in range(2)]
    labels = np.arange(len(names)) % 2 == 0
    data = Labelled([], labels, names)
    if len(set(names)) == 1:
        with pytest.raises(ReadoutValidationError, match="texts of one class only"):
            held_out(data, share, seed)
        return
    try:
        test = held_out(data, share, seed)
    except ReadoutValidationError:
        return  # All groups were needed for the share.
    held = {name for name, chosen in zip(names, test) if chosen}
    kept = {name for name, chosen in zip(names, test) if not chosen}
    assert not held & kept and test.sum() >= share * len(names)


def test_labelled_texts_and_pairs_are_read() -> None:
    pairs = [{"positive": f"p{i}", "negative": f"n{i}"} for i in range(4)]
    data = read(pairs)
    assert data.texts[:2] == ["p0", "n0"]
    assert data.labels.tolist() == [True, False] * 4
    assert data.groups == ["1", "1", "2", "2", "3", "3", "4", "4"]
    for labels in ((0, 1), (False, True), (0.0, 1.0), ("false", "True")):
        lines = [{"text": str(i), "label": labels[i % 2], "more": 1} for i in range(8)]
        assert read(lines).labels.tolist() == [False, True] * 4
    assert read(lines).groups is None


def test_columns_have_any_names_and_labels_any_text() -> None:
    moods = ["sad", "happy", "calm"]
    lines = [
        {"prompt": str(i), "text": "", "mood": moods[i % 3], "set": i}
        for i in range(12)
    ]
    data = read(lines, label="mood", positive="happy", group="set")
    assert data.texts == [str(i) for i in range(12)]
    assert data.labels.tolist() == [False, True, False] * 4
    assert data.groups == [str(i) for i in range(12)]


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([], "0 positive and 0 negative"),
        ([5], "line 1 .* is not an object"),
        ([{"text": "a", "label": 2}], "--positive"),
        ([{"text": "a", "label": "happy"}], "--positive"),
        ([{"text": "a", "label": None}], "--positive"),
        ([{"text": "a"}], "not ..label"),
        ([{"words": "a", "label": 1}], "none of"),
        ([{"text": "a", "label": 1}] * 9, "9 positive and 0 negative"),
        ([{"text": 5, "label": n % 2} for n in range(8)], "must be a text"),
        ([{"text": "", "label": n % 2} for n in range(8)], "must be a text"),
        ([{"text": ["a", [CHAT]][n % 2], "label": n % 2} for n in range(8)], "mixes"),
    ],
)
def test_bad_data_is_refused(entries: list[Any], said: str) -> None:
    with pytest.raises((ReadoutValidationError, SteeringValidationError), match=said):
        read(entries)
