# SPDX-License-Identifier: Apache-2.0
"""What a result shows, and in which form."""

import importlib.util
import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.support.browser import opened
from vllm.patching.picture import check_can_draw
from vllm.patching.result import Found, PatchResult, Skipped
from vllm.v1.steering.errors import SteeringValidationError


def result(**changes: Any) -> PatchResult:
    values = np.array([[0.5, math.nan], [1.5, -3.0]], dtype=np.float32)
    found = PatchResult(
        values={"post_block": values},
        layers=(2, 5),
        heads=None,
        positions=((0,), (1, 2)),
        tokens=("<a>", " b", " c"),
        metric="logit_diff",
        clean=2.0,
        corrupt=0.25,
        noise_floor=1e-6,
        skipped=[Skipped("post_block", 2, None, [1, 2], "no counterpart")],
    )
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def test_the_largest_changes_come_first() -> None:
    first, second, third = result().top(9)
    assert first == Found("post_block", 5, None, [1, 2], " b c", -3.0)
    assert (second.layer, third.layer) == (5, 2)
    assert result().top(1) == [first]


@pytest.mark.parametrize(
    ("changes", "baseline"),
    [({}, 0.25), ({"corrupt": math.nan}, 2.0), ({"metric": "recovered"}, 0.0)],
)
def test_changes_are_from_the_unpatched_prompt(
    changes: dict[str, Any], baseline: float
) -> None:
    assert result(**changes).baseline == baseline


def test_plain_data_has_none_for_what_is_missing() -> None:
    found = json.loads(json.dumps(result().as_json(), allow_nan=False))
    assert found["values"] == {"post_block": [[0.5, None], [1.5, -3.0]]}
    assert found["positions"] == [0, [1, 2]] and found["noise_floor"] == 1e-6
    assert found["skipped"][0]["reason"] == "no counterpart"


def test_a_saved_map_shows_changes_from_the_unpatched_prompt(tmp_path: Path) -> None:
    grid = np.array([[[0.5, 1.0], [math.nan, 2.0]]] * 2, dtype=np.float32)
    found = result(heads=(3, 7), values={"z": grid}, clean=1.0, corrupt=math.nan)
    found.save_html(tmp_path / "map.html")
    with opened() as tab:
        tab.goto((tmp_path / "map.html").as_uri())
        tab.focus(".heatmap canvas")
        tab.keyboard.press("ArrowRight")
        tab.keyboard.press("ArrowDown")
        assert "layer 2 head 7, position 0 <a>" in tab.inner_text(".reading")
        assert tab.errors == []


def test_a_notebook_shows_the_map_and_without_the_client_text() -> None:
    shown = result()._repr_html_()
    assert shown is not None and "sandbox" in shown and "<a>" not in shown
    with mock.patch.dict("sys.modules", {"clearbox_client.html": None}):
        assert result()._repr_html_() is None
        with pytest.raises(SteeringValidationError, match="pip install"):
            result().save_html("map.html")


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib"
)
def test_a_map_is_drawn(tmp_path: Path) -> None:
    result().heatmap(tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes()[1:4] == b"PNG"
    with pytest.raises(SteeringValidationError, match="no folder"):
        check_can_draw(tmp_path / "missing" / "map.png")
    with pytest.raises(SteeringValidationError, match="'map.xyz' is no picture"):
        check_can_draw(tmp_path / "map.xyz")


@pytest.mark.skipif(importlib.util.find_spec("pandas") is None, reason="needs pandas")
def test_a_table_has_a_row_for_each_cell() -> None:
    table = result().to_pandas()
    assert list(table.columns) == list(Found._fields) and len(table) == 4


def test_a_result_of_nothing_is_shown() -> None:
    empty = result(values={"z": np.full((2, 2), np.nan, dtype=np.float32)})
    assert empty.top() == [] and "null" in str(empty._repr_html_())
