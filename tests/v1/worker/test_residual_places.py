# SPDX-License-Identifier: Apache-2.0
"""Graphs are recorded at both places where additions may begin; the faster is kept."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.config.compilation import CUDAGraphMode
from vllm.model_executor.layers.residual_additions import FEW, WIDE, Places
from vllm.v1.worker import residual_places
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.residual_graphs import GraphFamilies, families_at_start
from vllm.v1.worker.residual_places import try_places

FULL = BatchExecutionDescriptor(CUDAGraphMode.FULL, 8, 8, 1, tapped=1)
SIZES = (1, 2, 8, 64, 128)
STEERS = {(layer, "pre_attn"): 100 + layer for layer in range(3)}
pytestmark = pytest.mark.usefixtures("no_engine")


class Graph:
    """A recording that takes as long as its place makes it."""

    def __init__(self, late: bool, times: tuple[float, float]) -> None:
        self.late, self.milliseconds = late, times[late]


class Manager:
    """Records graphs whose time depends on the place that holds meanwhile."""

    def __init__(self, width: int, times: dict[int, tuple[float, float]]) -> None:
        self.width, self.times = width, times
        self.recorded: list[int] = []
        self.fails = False
        self.graphs: dict[Any, Any] = {}
        for size in times:
            self._record(replace(FULL, num_tokens=size, num_reqs=size))

    def _record(self, descriptor: BatchExecutionDescriptor) -> None:
        size = descriptor.num_tokens
        late = Places.late(size, self.width)
        self.graphs[descriptor] = Graph(late, self.times[size])

    def residual_recorder(self, descriptor: BatchExecutionDescriptor) -> None:
        if self.fails:
            raise RuntimeError("out of memory")
        self.recorded.append(descriptor.num_tokens)
        self._record(descriptor)

    def try_places(self) -> None:
        try_places(self, list(self.graphs), self.width)  # type: ignore[arg-type]

    def kept(self) -> dict[int, bool]:
        return {one.num_tokens: graph.late for one, graph in self.graphs.items()}


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(residual_places, "_milliseconds", lambda g: g.milliseconds)
    Places.found.clear()
    yield
    Places.found.clear()


@given(st.lists(st.tuples(*[st.floats(1, 9)] * 2), min_size=5, max_size=5))
def test_the_faster_of_two_graphs_is_kept(times: list[tuple[float, float]]) -> None:
    Places.found.clear()
    manager = Manager(WIDE, dict(zip(SIZES, times)))
    for _ in range(2):  # Graphs that are recorded anew begin where they did.
        manager.try_places()
        for size, late in manager.kept().items():
            early_ms, late_ms = manager.times[size]
            assert late == Places.late(size, WIDE)
            if size > FEW:
                assert not late
            elif late != (late_ms < early_ms):
                assert late_ms == pytest.approx(early_ms, rel=0.004)
        assert set(manager.recorded) == {1, 2, 8, 64}


def test_a_narrow_stream_has_one_place() -> None:
    manager = Manager(WIDE // 2, {size: (2.0, 1.0) for size in SIZES})
    manager.try_places()
    assert not manager.recorded
    assert not any(manager.kept().values())


def test_other_sizes_do_as_the_next_power_of_two() -> None:
    manager = Manager(WIDE, {4: (1.0, 2.0), 8: (2.0, 1.0), 10: (1.0, 2.0)})
    manager.try_places()
    assert [Places.late(n, WIDE) for n in (3, 4, 5, 7, 8, 10)] == [
        *(False, False, True, True, True),
        False,  # It was tried itself.
    ]
    assert Places.late(20, WIDE) == Places.usual(20)


def test_a_failure_leaves_what_there_was(caplog: pytest.LogCaptureFixture) -> None:
    manager = Manager(WIDE, {8: (1.0, 2.0), 16: (1.0, 2.0)})
    before = dict(manager.graphs)
    manager.fails = True
    with caplog.at_level(logging.ERROR, logger=residual_places.logger.name):
        manager.try_places()
    assert manager.graphs == before
    assert manager.kept() == {n: Places.late(n, WIDE) for n in (8, 16)}


@pytest.mark.parametrize("may_record", [True, False])
def test_only_graphs_of_additions_alone_are_tried(may_record: bool) -> None:
    capture = {tap: 900 + address for tap, address in STEERS.items()}
    found = families_at_start(capture, STEERS, may_record)
    graphs = GraphFamilies(found, one_family=False, may_record=may_record)
    steers = frozenset(STEERS.values())
    alone = found.index(steers)
    recorded: list[int] = []

    def record(descriptor: BatchExecutionDescriptor) -> None:
        recorded.append(descriptor.tapped)
        manager.graphs[descriptor] = Graph(True, (2.0, 1.0))

    manager: Any = SimpleNamespace(
        graphs={
            replace(FULL, tapped=family): Graph(False, (2.0, 1.0))
            for family in range(len(found))
        },
        residual_recorder=record,
    )
    graphs.try_places(manager, steers, WIDE)
    assert recorded == ([alone] if may_record else [])


def test_another_engine_begins_without_what_was_found() -> None:
    Places.found[8] = False
    GraphFamilies([frozenset()], one_family=False, may_record=True)
    assert not Places.found
