# SPDX-License-Identifier: Apache-2.0
"""Results in a notebook, and their parts."""

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.readouts.frontend.collector import Joined, _note_changed
from vllm.v1.readouts.results import ReadoutResult
from vllm.v1.residual.readout_plan import Readout, ReadoutPart


def result() -> ReadoutResult:
    values = np.array([[0.25], [-3.5]], np.float32)
    return ReadoutResult("probe", [4, 7], ((1, "post_block"),), {"values": values})


def test_a_result_is_a_table_as_in_the_client() -> None:
    shown = result()._repr_html_()
    assert shown is not None and "probe" in shown
    assert all(text in shown for text in ("<td>4</td>", "<td>7</td>", "0.25", "-3.5"))
    with pytest.raises(KeyError, match=r"'value' is not in .*values \[2, 1\]"):
        result()["value"]


def test_a_full_pattern_is_drawn() -> None:
    weights = np.tril(np.ones((2, 3, 3), np.float32))
    taps = ((1, "attention"),)
    shown = ReadoutResult("attention", [0, 1, 2], taps, {"weights": weights})
    assert "standalone.js" in (shown._repr_html_() or "")


def test_without_the_client_there_is_only_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "clearbox_client.readouts", None)
    assert result()._repr_html_() is None and "probe" in repr(result())


@pytest.mark.parametrize("after", [-1, 1])
def test_a_change_of_what_enters_the_head_is_noted_beside_its_logits(
    after: int,
) -> None:
    last = {(1, "final_norm")}
    for kind in ("lens", "attribution"):
        read = Readout("n", kind, ((1, "post_block"),), ((0, 9),), after=after)
        noted = _note_changed(read, last)
        assert noted is not None and "changes final_norm of layer 1, " in noted
        assert '"after"' not in noted
    norm = Readout("n", "norm", ((1, "post_block"),), ((0, 9),))
    assert _note_changed(norm, last) is None


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 3), st.booleans()), max_size=9
    ),
    st.integers(0, 20),
)
def test_parts_join_alike_however_they_were_sent(
    drawn: list[tuple[int, int, bool]], stop: int
) -> None:
    """Also single tokens behind gaps, beside parts of several and beside errors."""
    readout = Readout("n", "norm", ((1, "post_block"),), ((0, 99),))
    packed, plain, position, expected = Joined(readout), Joined(readout), 0, []
    for gap, count, fails in drawn:
        position += gap
        values = np.arange(position, position + count, dtype=np.float32)[:, None]
        arrays = {} if fails else {"norm": values, "cosine": -values}
        error = "failed" if fails else ""
        for joined, packs in ((packed, True), (plain, False)):
            part = ReadoutPart("n", position, count, {**arrays}, error=error)
            if packs:
                part.pack()
            joined.add(part)
        expected += [] if fails else range(position, min(position + count, stop))
        position += count
    found, other = packed.whole(stop), plain.whole(stop)
    assert found.positions == other.positions == expected
    assert found.error == other.error
    assert found.arrays.keys() == other.arrays.keys()
    for name, sign in (("norm", 1), ("cosine", -1)):
        if expected:
            assert (sign * found[name][:, 0] == expected).all()
            assert (found[name] == other[name]).all()
