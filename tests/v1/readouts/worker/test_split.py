# SPDX-License-Identifier: Apache-2.0
"""Every tap of a readout is computed once, where its rows are or come to."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.readouts.worker.stages import Stages
from vllm.v1.residual.readout_plan import Readout
from vllm.v1.residual.tap import Tap

STARTS = (0, 2, 3)
"""Stages with the layers 0 and 1, 2, and 3."""


def block(*layers: int) -> tuple[Tap, ...]:
    return tuple((layer, "post_block") for layer in layers)


def readout(kind: str, taps: tuple[Tap, ...]) -> Readout:
    return Readout("r", kind, taps, ((0, 9),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "kind, layers, expected",
    [
        ("probe", (0,), [(0, (0,))]),
        ("sae", (2,), [(1, (2,))]),
        ("lens", (0,), [(2, (0,))]),
        ("lens", (0, 3), [(2, (0, 3))]),
        ("custom", (0, 1), [(0, (0, 1))]),
        ("custom", (1, 2), [(2, (1, 2))]),
        ("rows", (0, 1, 3), [(0, (0, 1)), (2, (3,))]),
        # The cosines of layers 2 and 3 need rows of two stages each.
        ("norm", (0, 1, 2, 3), [(0, (0, 1)), (2, (2, 3))]),
        ("norm", (1,), [(0, (1,))]),
    ],
)
def test_a_part_is_computed_where_its_rows_are(
    kind: str, layers: tuple[int, ...], expected: list[tuple[int, tuple[int, ...]]]
) -> None:
    parts = Stages(STARTS, 0).parts(readout(kind, block(*layers)))
    assert [(s, tuple(n for n, _ in part.taps)) for s, part in parts] == expected


@st.composite
def split_models(draw: st.DrawFn) -> tuple[tuple[int, ...], int]:
    layers = draw(st.integers(1, 9))
    inner = draw(st.sets(st.integers(1, layers - 1), max_size=3)) if layers > 1 else ()
    return (0, *sorted(inner)), layers


@given(split_models(), st.sampled_from(["lens", "rows", "norm", "custom"]), st.data())
def test_stages_compute_or_send_each_row_once(
    model: tuple[tuple[int, ...], int], kind: str, data: st.DataObject
) -> None:
    starts, layers = model
    every = [(n, hook) for hook in ("pre_attn", "post_block") for n in range(layers)]
    taps = data.draw(st.lists(st.sampled_from(every), min_size=1, unique=True))
    whole = readout(kind, tuple(taps))
    done: list[Tap] = []
    sent: list[Tap] = []
    joined = None
    for own, (first, stop) in enumerate(pairwise((*starts, layers))):
        local = {tap for tap in whole.staged if first <= tap[0] < stop}
        share = Stages(starts, own).share(whole, local)
        for part in share.here:
            assert local.issuperset(part.staged)
            assert kind != "lens" or own == len(starts) - 1
            done += part.taps
        if share.sent is not None:
            assert local.issuperset(share.sent.staged)
            sent += share.sent.taps
        assert share.joined is None or own == len(starts) - 1
        joined = share.joined
    if joined is None:
        assert not sent
    else:
        done += joined.taps
        assert sorted(sent) == sorted(joined.staged)
    assert sorted(done) == sorted(taps)


def test_a_stage_without_rows_of_a_lens_sends_none() -> None:
    lens = readout("lens", block(0, 3))
    share = Stages(STARTS, 2).share(lens, set())
    assert share.sent is None and share.joined == lens
