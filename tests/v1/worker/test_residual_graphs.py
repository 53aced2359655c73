# SPDX-License-Identifier: Apache-2.0
"""The choice of a step's graph, without a GPU, with a counting graph manager."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.compilation import cudagraph_pool
from vllm.config.capture import CaptureConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.config.steering import SteeringConfig
from vllm.distributed import parallel_state
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.forward_context import BatchDescriptor
from vllm.model_executor.layers.residual.capture_op import Launch
from vllm.v1.worker import residual_graph_choice, residual_graphs
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.residual_graph_choice import GraphFamilies
from vllm.v1.worker.residual_graphs import (
    NOTHING,
    GraphRecorder,
    Ops,
    as_recorded,
    begin_recording,
    dispatched_families,
    end_recording,
    families_at_start,
    record_family,
    with_families,
)
from vllm.v1.worker.residual_open import open_residual_stream

LAYERS = 6
HOOKS = ("pre_attn", "post_attn", "post_block")
TAPS = [(layer, hook) for layer in range(LAYERS) for hook in HOOKS]
CAPTURE = {tap: 1000 + number for number, tap in enumerate(TAPS)}
STEERING = {tap: 2000 + number for number, tap in enumerate(TAPS)}
STEERS = frozenset(STEERING.values())
EVERYTHING = frozenset(CAPTURE.values()) | frozenset(STEERING.values())
FULL = BatchExecutionDescriptor(CUDAGraphMode.FULL, 1, 1, 1)
SIZES = (512, 400, 384, 256, 200, 184, 24, 16, 8, 4, 2, 1)
PIECES = [BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, n, None) for n in SIZES]
pytestmark = pytest.mark.usefixtures("no_engine")


def config(ranks: int = 1, engines: int = 1, stages: int = 1) -> Any:
    """The parts of a configuration that decide what may be recorded later."""
    parallel = SimpleNamespace(
        world_size=ranks * stages,
        data_parallel_size=engines,
        pipeline_parallel_size=stages,
    )
    return SimpleNamespace(
        parallel_config=parallel, lora_config=None, use_v2_model_runner=True
    )


class Manager:
    """Keeps graphs by descriptor, like upstream's manager; records requested ones."""

    def __init__(self, fails: bool = False) -> None:
        plain = {
            CUDAGraphMode.FULL: [FULL, replace(FULL, num_tokens=16)],
            CUDAGraphMode.PIECEWISE: PIECES,
        }
        self._capture_descs = with_families(plain, config())
        self.graphs: dict[BatchExecutionDescriptor, Any] = {
            one: Launch.families[one.tapped]
            for one in self._capture_descs[CUDAGraphMode.FULL]
        }
        self.fails = fails

    def residual_recorder(self, descriptor: BatchExecutionDescriptor) -> None:
        if self.fails:
            raise RuntimeError("out of memory")
        assert descriptor not in self.graphs, "recorded twice"
        self.graphs[descriptor] = Launch.families[descriptor.tapped]


def families(may_record: bool = True) -> GraphFamilies:
    started = families_at_start(CAPTURE, STEERING, {}, may_record)
    return GraphFamilies(started, may_record=may_record)


def run(graphs: GraphFamilies, manager: Any, needed: frozenset[int]) -> frozenset[int]:
    """The ops in the graph that a step with these needs runs."""
    graphs.plan(needed & STEERS, needed - STEERS)
    chosen = graphs.choose(FULL, manager)
    graphs.end()
    assert Launch.taps == NOTHING
    assert graphs.choose(FULL, manager) == FULL, "a dummy run did something"
    launched: frozenset[int] = manager.graphs[chosen]
    return launched


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE])
def test_only_graphs_of_whole_passes_are_recorded_as_such(mode: CUDAGraphMode) -> None:
    families()
    last = len(Launch.families) - 1
    record_family(last, mode)
    assert Launch.taps == EVERYTHING
    assert Launch.whole == (mode == CUDAGraphMode.FULL)
    end_recording()
    assert Launch.taps == NOTHING
    assert not Launch.whole


class FakeStream:
    def wait_stream(self, other: object) -> None:
        """Nothing runs."""


class Recordings:
    """A stand-in for CUDA's recording, with the stream of each recording."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.streams: list[object] = []
        self._current: list[object] = [FakeStream()]
        for name, fake in {
            "Stream": lambda device: FakeStream(),
            "current_stream": lambda: self._current[-1],
            "stream": self._on,
            "CUDAGraph": object,
            "graph": self._graph,
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        group: Any = SimpleNamespace(device_communicator=None)
        group.graph_capture = partial(GroupCoordinator.graph_capture, group)
        monkeypatch.setattr(parallel_state, "get_tp_group", lambda: group)
        monkeypatch.setattr(cudagraph_pool, "capture_pool", lambda *_: nullcontext(7))

    @contextmanager
    def _on(self, stream: object) -> Iterator[None]:
        self._current.append(stream)
        yield
        self._current.pop()

    @contextmanager
    def _graph(
        self, graph: object, pool: object, stream: object, capture_error_mode: str
    ) -> Iterator[None]:
        assert (pool, stream) == (7, self._current[-1])
        assert capture_error_mode == "thread_local"
        self.streams.append(stream)
        yield


def test_graphs_are_recorded_on_one_stream_as_what_they_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recordings = Recordings(monkeypatch)
    graphs = families()
    manager: Any = SimpleNamespace(
        device="cuda", pool=None, vllm_config=None, graphs={}
    )
    manager._capture_stream = lambda _: torch.cuda.current_stream()
    passes: list[tuple[bool, Ops, object]] = []

    def create_forward(descriptor: BatchExecutionDescriptor, warmup: bool) -> Any:
        def forward(mode: CUDAGraphMode) -> None:
            assert mode == CUDAGraphMode.NONE
            record_family(descriptor.tapped, descriptor.cg_mode)
            passes.append((warmup, Launch.taps, torch.cuda.current_stream()))
            if descriptor.num_tokens == 2:
                raise RuntimeError("out of memory")

        return forward

    record = GraphRecorder(manager, create_forward)
    graphs.plan(STEERS, NOTHING)
    wanted = [replace(FULL, num_tokens=n, tapped=n) for n in (1, 3)]
    for one in wanted:
        record(one)
        assert Launch.taps == STEERS, "the current step does something else now"
    with pytest.raises(RuntimeError, match="out of memory"):
        record(replace(FULL, num_tokens=2, tapped=1))
    assert Launch.taps == STEERS
    assert not Launch.whole
    assert list(manager.graphs) == wanted
    assert len(set(recordings.streams)) == 1
    first = recordings.streams[0]
    expected = [Launch.families[n] for n in (1, 3, 1)]
    assert passes == [(False, launched, first) for launched in expected]


BEHIND = {a for (_, hook), a in CAPTURE.items() if hook == "post_block"}
CAPTURES, PROGRAMS = (
    set(CAPTURE.values()),
    {tap: 3000 + n for n, tap in enumerate(TAPS)},
)
BOTH = STEERS | set(PROGRAMS.values())


@pytest.mark.parametrize(
    ("captures", "steers", "programs", "may_record", "families"),
    [
        (CAPTURE, STEERING, {}, True, [BEHIND, STEERS, EVERYTHING]),
        (CAPTURE, STEERING, {}, False, [BEHIND, CAPTURES, STEERS, EVERYTHING]),
        *(({}, STEERING, {}, later, [STEERS]) for later in (True, False)),
        *((CAPTURE, {}, {}, later, [BEHIND, CAPTURES]) for later in (True, False)),
        *(({}, {}, {}, later, []) for later in (True, False)),
        (CAPTURE, STEERING, PROGRAMS, True, [BEHIND, STEERS, BOTH, EVERYTHING | BOTH]),
        ({}, STEERING, PROGRAMS, True, [STEERS, BOTH]),
    ],
)
def test_the_start_records_plain_and_the_usual_families(
    captures: Any, steers: Any, programs: Any, may_record: bool, families: list[Any]
) -> None:
    """Each feature alone where nothing is recorded later; programs apart."""
    found = families_at_start(captures, steers, programs, may_record)
    assert found == [set(), *families]


def test_piecewise_graphs_come_plain_and_some_with_everything() -> None:
    families()
    made = with_families({CUDAGraphMode.PIECEWISE: PIECES}, config())
    by_family: dict[int, list[int]] = {}
    for one in made[CUDAGraphMode.PIECEWISE]:
        by_family.setdefault(one.tapped, []).append(one.num_tokens)
    assert by_family == {
        0: list(SIZES),
        3: [512, 384, 256, 184, 24, 16, 8, 4, 2, 1],
    }


@pytest.mark.parametrize("size", SIZES)
def test_a_prompts_step_is_padded_to_the_next_graph_that_launches(size: int) -> None:
    graphs, manager = families(), Manager()
    plain = next(one for one in PIECES if one.num_tokens == size)
    typed: Any = manager
    assert graphs.choose(plain, typed) == plain
    graphs.plan(STEERS, NOTHING)
    chosen = graphs.choose(plain, typed)
    assert chosen in manager._capture_descs[CUDAGraphMode.PIECEWISE]
    assert chosen.tapped == 3
    assert size <= chosen.num_tokens <= size / residual_graphs.COARSENESS
    # With adapters there are more graphs of the same sizes.
    other = replace(plain, num_active_loras=1)
    manager._capture_descs = with_families(
        {CUDAGraphMode.PIECEWISE: [other, *PIECES]}, config()
    )
    assert graphs.choose(other, typed) == replace(other, tapped=3)


@pytest.mark.parametrize("parallel", [{"engines": 2}, {"stages": 2}])
def test_steps_that_ranks_must_pad_alike_are_padded_no_further(
    parallel: dict[str, int],
) -> None:
    """An op that one rank launches another one may not need."""
    families()
    made = with_families({CUDAGraphMode.PIECEWISE: PIECES}, config(**parallel))
    launching = [one for one in made[CUDAGraphMode.PIECEWISE] if one.tapped]
    assert [one.num_tokens for one in launching] == list(SIZES)


@pytest.mark.parametrize(
    ("requests", "several", "expected"),
    [
        (1, {}, [0, 1, 2, 3]),
        (32, {}, [0, 3]),
        (24, {}, [0]),
        (24, {"ranks": 2}, [0]),
        (24, {"stages": 2}, [0]),
        (24, {"engines": 2}, [0, 1, 2, 3]),
    ],
)
def test_what_can_be_recorded_later_is_recorded_for_few_sizes(
    requests: int, several: dict[str, int], expected: list[int]
) -> None:
    families()
    # Three tokens per request, as with two drafts.
    step = BatchExecutionDescriptor(CUDAGraphMode.FULL, 3 * requests, requests, 3)
    made = with_families({CUDAGraphMode.FULL: [step]}, config(**several))
    assert [one.tapped for one in made[CUDAGraphMode.FULL]] == expected


def unusual(graphs: GraphFamilies, manager: Any, needed: Ops) -> Ops | None:
    """The ops that a step of 7 requests launches; None if no graph is run."""
    graphs.plan(needed & STEERS, needed - STEERS)
    chosen = graphs.choose(replace(FULL, num_tokens=7, num_reqs=7), manager)
    graphs.end()
    if chosen.cg_mode == CUDAGraphMode.NONE:
        assert (chosen.num_tokens, chosen.tapped) == (7, 0)
        return None
    launched: Ops = manager.graphs[chosen]
    return launched


def test_the_first_step_of_an_unusual_size_records_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(residual_graph_choice, "RECORD_AFTER", 2)
    # What every size may need once is not counted.
    monkeypatch.setattr(residual_graph_choice, "MOST_RECORDED", 1)
    graphs, manager = families(), Manager()
    launched = [unusual(graphs, manager, STEERS) for _ in range(4)]
    assert launched == [EVERYTHING, EVERYTHING, STEERS, STEERS]
    other = frozenset({CAPTURE[2, "post_block"]})
    assert [unusual(graphs, manager, other) for _ in range(4)] == [EVERYTHING] * 4


def test_a_step_whose_first_graph_cannot_be_recorded_runs_without() -> None:
    graphs, manager = families(), Manager(fails=True)
    assert unusual(graphs, manager, STEERS) is None
    manager.fails = False
    assert unusual(graphs, manager, STEERS) is None, "it was tried again"
    assert run(graphs, manager, STEERS) == STEERS


def test_steps_with_few_changing_needs_count_for_one_family(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(residual_graph_choice, "RECORD_AFTER", 4)
    graphs, manager = families(), Manager()
    usual = replace(FULL, num_tokens=8, num_reqs=8)
    manager.graphs[replace(usual, tapped=3)] = EVERYTHING
    launched = []
    for address in sorted(BEHIND):
        graphs.plan(NOTHING, frozenset({address}))
        launched.append(manager.graphs[graphs.choose(usual, manager)])  # type: ignore[arg-type]
        graphs.end()
    assert launched == [EVERYTHING] * 3 + [BEHIND] * 3


@pytest.mark.parametrize("estimates", [True, False])
def test_memory_of_piecewise_graphs_is_estimated_from_plain_ones(
    estimates: bool,
) -> None:
    families()
    made = with_families({CUDAGraphMode.PIECEWISE: PIECES}, config())
    manager: Any = SimpleNamespace(
        _capture_descs=made, _max_full_descs_to_capture=2 if estimates else None
    )
    begin_recording(manager, lambda descriptor, warmup: lambda mode: None)
    found = made[CUDAGraphMode.PIECEWISE]
    assert {one.tapped for one in found} == ({0} if estimates else {0, 3})


@given(
    st.lists(
        st.sets(st.sampled_from(sorted(EVERYTHING)), max_size=20),
        min_size=1,
        max_size=6,
    ),
    st.lists(st.integers(0, 5), max_size=40),
)
def test_a_step_runs_a_graph_that_has_what_it_needs(
    wishes: list[set[int]], steps: list[int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(residual_graph_choice, "RECORD_AFTER", 3)
        graphs = families()
        manager = Manager()
        for index in steps:
            needed = frozenset(wishes[index % len(wishes)])
            launched = run(graphs, manager, needed)
            assert needed <= launched
            if not needed:
                assert launched == NOTHING, "a plain step ran another graph"


def test_a_graph_that_is_wanted_often_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(residual_graph_choice, "RECORD_AFTER", 3)
    graphs = families()
    manager = Manager()
    one = frozenset({STEERING[3, "post_block"]})
    launched = [run(graphs, manager, one) for _ in range(5)]
    assert launched == [STEERS] * 2 + [one] * 3
    two = one | {STEERING[4, "post_block"]}
    assert [run(graphs, manager, two) for _ in range(3)][-1] == two


def test_the_more_it_saves_the_sooner_a_graph_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(residual_graph_choice, "RECORD_AFTER", 9)
    monkeypatch.setattr(residual_graph_choice, "SUPERFLUOUS_LAUNCHES", 4 * 17)
    graphs = families()
    manager = Manager()
    one = frozenset({STEERING[3, "post_block"]})  # It saves 17 of 18 launches.
    most = frozenset(sorted(EVERYTHING)[5:])
    assert [run(graphs, manager, one) for _ in range(5)].index(one) == 3
    assert [run(graphs, manager, most) for _ in range(10)].index(most) == 8


def test_little_is_not_worth_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual_graph_choice, "RECORD_AFTER", 1)
    graphs = families()
    manager = Manager()
    most = frozenset(sorted(EVERYTHING)[3:])
    assert run(graphs, manager, most) == EVERYTHING


def test_recordings_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual_graph_choice, "RECORD_AFTER", 1)
    monkeypatch.setattr(residual_graph_choice, "MOST_RECORDED", 2)
    graphs = families()
    manager = Manager()
    before = len(manager.graphs)
    for address in CAPTURE.values():
        run(graphs, manager, frozenset({address}))
    assert len(manager.graphs) == before + 2


def test_a_failed_recording_is_the_last_and_costs_no_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(residual_graph_choice, "RECORD_AFTER", 1)
    graphs = families()
    manager = Manager(fails=True)
    one = frozenset({CAPTURE[0, "pre_attn"]})
    assert run(graphs, manager, one) == EVERYTHING
    manager.fails = False
    before = len(manager.graphs)
    run(graphs, manager, one)
    assert len(manager.graphs) == before


def test_where_ranks_step_on_their_own_nothing_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(residual_graph_choice, "RECORD_AFTER", 1)
    graphs = families(may_record=False)
    manager = Manager()
    before = len(manager.graphs)
    run(graphs, manager, frozenset({CAPTURE[0, "pre_attn"]}))
    assert len(manager.graphs) == before


def test_a_pass_without_graphs_launches_just_what_it_needs() -> None:
    graphs = families()
    needed = frozenset({STEERING[0, "pre_attn"]})
    graphs.plan(needed, NOTHING)
    assert Launch.taps == needed
    eager = replace(FULL, cg_mode=CUDAGraphMode.NONE)
    assert graphs.choose(eager, None) == eager
    graphs.end()
    assert Launch.taps == NOTHING


DISPATCHED = BatchDescriptor(num_tokens=24, num_reqs=24, uniform=True)
"""A step of the V1 runner; the size is no power of two."""


def test_the_v1_runner_records_whole_passes_in_all_families() -> None:
    families(may_record=False)
    pieces = replace(DISPATCHED, num_reqs=None, uniform=False)
    modes = CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
    made = dispatched_families(list(zip(modes, ([pieces], [DISPATCHED]))))
    last = len(Launch.families) - 1
    assert made == [
        (CUDAGraphMode.PIECEWISE, [replace(pieces, tapped=n) for n in (0, last)]),
        (CUDAGraphMode.FULL, [replace(DISPATCHED, tapped=n) for n in range(last + 1)]),
    ]


def test_the_v1_runner_finds_the_graphs_that_it_has_recorded() -> None:
    graphs = families(may_record=False)
    recorded: dict[BatchDescriptor, Ops] = {}
    for mode, of_mode in dispatched_families([(CUDAGraphMode.FULL, [DISPATCHED])]):
        for one in of_mode:
            record_family(one.tapped, mode)
            # The runner makes the key of a dummy pass anew.
            recorded[as_recorded(DISPATCHED)] = Launch.taps
            end_recording()
    captures = frozenset(CAPTURE.values())
    some = frozenset({CAPTURE[2, "pre_attn"]}), frozenset({STEERING[3, "post_attn"]})
    for steers, takes, expected in (
        (NOTHING, NOTHING, NOTHING),
        (some[1], NOTHING, STEERS),
        (NOTHING, some[0], captures),
        (some[1], some[0], EVERYTHING),
    ):
        graphs.plan(steers, takes)
        full = graphs.dispatch(CUDAGraphMode.FULL, DISPATCHED)
        assert recorded[full] == expected
        eager = graphs.dispatch(CUDAGraphMode.NONE, DISPATCHED)
        pieces = graphs.dispatch(CUDAGraphMode.PIECEWISE, DISPATCHED)
        everything = Launch.families.index(EVERYTHING)
        assert (eager.tapped, pieces.tapped) == (0, everything if expected else 0)
        graphs.end()
        # An idle engine's dummy pass.
        assert as_recorded(graphs.dispatch(CUDAGraphMode.FULL, DISPATCHED)).tapped == 0


def test_an_engine_without_features_records_plain_graphs_whatever_was_before() -> None:
    families()
    no_features: Any = SimpleNamespace(
        capture_config=CaptureConfig(),
        steering_config=SteeringConfig(),
        parallel_config=SimpleNamespace(nnodes=1, use_ray=False),
        model_config=SimpleNamespace(
            is_encoder_decoder=False, get_total_num_hidden_layers=lambda: 1
        ),
    )
    open_residual_stream(no_features, torch.nn.Module(), torch.device("cpu"))
    plain = {CUDAGraphMode.FULL: [FULL], CUDAGraphMode.PIECEWISE: [FULL]}
    assert with_families(plain, config()) == plain
    dispatched = [(CUDAGraphMode.FULL, [DISPATCHED])]
    assert dispatched_families(dispatched) == dispatched
    assert Launch.taps == NOTHING
