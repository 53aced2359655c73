# SPDX-License-Identifier: Apache-2.0
"""Graphs of lenses: recorded on a GPU; elsewhere a stand-in computes at each replay."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.v1.readouts.worker import lens_graphs
from vllm.v1.readouts.worker.lens_graphs import LensGraphs, padded

pytestmark = pytest.mark.usefixtures("no_engine")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH = 24

Made = tuple[LensGraphs, list[int]]


class Replays(LensGraphs):
    """Graphs without a GPU."""

    def _recorded(self, kind: lens_graphs.Kind) -> Any:
        size, top_k = kind
        found = self._compute(self._rows[:size], top_k, ())

        def replay() -> None:
            found.copy_(weighed(self._rows[:size], top_k))

        return SimpleNamespace(replay=replay), found


def weighed(rows: torch.Tensor, top_k: int) -> torch.Tensor:
    columns = torch.arange(WIDTH * top_k, device=rows.device).view(WIDTH, top_k)
    return (rows @ columns.sin())[None]


@pytest.fixture
def make() -> Callable[..., Made]:
    def made(size: int = 64, fails: bool = False) -> Made:
        calls: list[int] = []

        def compute(rows: torch.Tensor, top_k: int, tokens: Any) -> torch.Tensor:
            calls.append(len(rows))
            if fails and rows.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("no memory")
            return weighed(rows, top_k) + len(tokens)

        # On a CPU `LensGraphs` itself cannot record.
        kind = LensGraphs if DEVICE == "cuda" or fails else Replays
        return kind(compute, torch.zeros(size, WIDTH, device=DEVICE)), calls

    return made


def rows_of(count: int) -> torch.Tensor:
    return torch.randn(count, WIDTH, device=DEVICE)


@pytest.fixture(autouse=True)
def own_stream() -> Any:
    """The default one records nothing, and the engine's is another."""
    if DEVICE == "cpu":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


def test_replayed_values_are_those_of_the_rows(make: Callable[..., Made]) -> None:
    graphs, calls = make()
    kept = []
    for step in range(300):
        rows, top_k = rows_of(1 + step * 7 % 64), 1 + step % 2
        kept.append((graphs(rows, top_k, ()), weighed(rows, top_k)))
    for found, expected in kept:  # Later ones have not overwritten them.
        torch.testing.assert_close(found, expected)
    assert len(calls) < 150


def test_a_graph_is_recorded_once(make: Callable[..., Made]) -> None:
    graphs, calls = make()
    for _ in range(20):
        graphs(rows_of(17), 2, ())
        graphs(rows_of(30), 2, ())
    assert calls == [17, 30] * 3 + [17, 32]


def test_some_are_never_recorded(make: Callable[..., Made]) -> None:
    graphs, calls = make()
    for _ in range(20):
        rows = rows_of(65)
        torch.testing.assert_close(graphs(rows, 1, ()), weighed(rows, 1))
        torch.testing.assert_close(graphs(rows[:3], 1, (5,)), weighed(rows[:3], 1) + 1)
    assert calls == [65, 3] * 20


def test_a_rank_that_cannot_record_exchanges_as_many_rows(
    make: Callable[..., Made],
) -> None:
    graphs, calls = make(fails=True)
    for _ in range(12):
        rows = rows_of(5)
        torch.testing.assert_close(graphs(rows, 1, ()), weighed(rows, 1))
    assert calls[:7] == [5] * 7 and set(calls[-5:]) == {16}


def test_rows_that_are_there_already_are_not_copied(make: Callable[..., Made]) -> None:
    graphs, _ = make()
    graphs._rows[:3] = rows_of(3)
    expected, version = weighed(graphs._rows[:3], 2), graphs._rows._version
    for _ in range(10):
        torch.testing.assert_close(graphs(graphs._rows[:3], 2, ()), expected)
    assert graphs._rows._version == version


@pytest.mark.parametrize("count", [1, 16, 17, 33, 100, 129, 256, 257, 300, 512])
def test_padding_is_small(count: int) -> None:
    assert count <= padded(count) <= max(16, 1.25 * count + 15)
    assert len({padded(n) for n in range(1, 513)}) <= lens_graphs.MOST_GRAPHS / 2
