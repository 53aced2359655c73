# SPDX-License-Identifier: Apache-2.0
"""Results in a notebook."""

import sys

import numpy as np
import pytest

from vllm.v1.readouts.results import ReadoutResult


def result() -> ReadoutResult:
    values = np.array([[0.25], [-3.5]], np.float32)
    return ReadoutResult("probe", [4, 7], ((1, "post_block"),), {"values": values})


def test_a_result_is_a_table_as_in_the_client() -> None:
    shown = result()._repr_html_()
    assert shown is not None and "probe" in shown
    assert all(text in shown for text in ("<td>4</td>", "<td>7</td>", "0.25", "-3.5"))


def test_a_full_pattern_is_drawn() -> None:
    weights = np.tril(np.ones((2, 3, 3), np.float32))
    taps = ((1, "attention"),)
    shown = ReadoutResult("attention", [0, 1, 2], taps, {"weights": weights})
    assert "standalone.js" in (shown._repr_html_() or "")


def test_without_the_client_there_is_only_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "clearbox_client.readouts", None)
    assert result()._repr_html_() is None and "probe" in repr(result())
