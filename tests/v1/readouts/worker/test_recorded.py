# SPDX-License-Identifier: Apache-2.0
"""Steps that are replayed have the results of steps that are not."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.v1.readouts.worker.test_worker import (
    HIDDEN,
    LAYERS,
    SLOTS,
    VOCABULARY,
    Model,
    block,
    configuration,
    draw,
    row,
)
from vllm.v1.capture.staging.slot_mapping import slots_of
from vllm.v1.readouts.modules import ProbeModule
from vllm.v1.readouts.worker import probe_kernel, recorded, worker
from vllm.v1.readouts.worker.pending import PendingReadouts
from vllm.v1.readouts.worker.recorded import RecordedSteps
from vllm.v1.residual.readout_plan import Probe, Readout, ReadoutPlan
from vllm.v1.residual.row_blocks import LocalGroup
from vllm.v1.residual.sae import SparseAutoencoder
from vllm.v1.residual.step_layout import StepLayout
from vllm.v1.residual.step_view import StepView

EVERYWHERE = ((0, 1 << 30),)
LENS = Readout("lens", "lens", block(0, 1, 2, 3), EVERYWHERE, top_k=3)
PROBE = Readout("probe", "probe", block(1), EVERYWHERE, module="probe")
SAE = Readout("sae", "sae", block(2), EVERYWHERE, module="sae", top_k=2)
NORM = Readout("norm", "norm", block(1, 2), EVERYWHERE)
OWN = [
    Readout(
        "own",
        "probe",
        block(3),
        EVERYWHERE,
        probe=Probe(draw(1, HIDDEN, seed=seed).numpy().tobytes(), (0.5,)),
    )
    for seed in (11, 12)
]
PLANS = {
    "a": (PROBE,),
    "b": (PROBE, LENS),
    "c": (SAE,),
    "d": (PROBE, SAE),
    "e": (OWN[0],),
    "f": (OWN[1], NORM),
}


class Modules:
    """A probe and an SAE."""

    def __init__(self) -> None:
        self._probe = ProbeModule(
            vectors=draw(2, HIDDEN, seed=5), bias=draw(2, seed=6), activation="sigmoid"
        )
        self._sae = SparseAutoencoder(
            name="sae",
            layout="saelens",
            w_enc=draw(HIDDEN, 16, seed=7),
            w_dec=draw(16, HIDDEN, seed=8),
            b_enc=draw(16, seed=9),
            b_dec=draw(HIDDEN, seed=10),
            threshold=torch.zeros(16),
            selection="threshold",
        )

    def __contains__(self, name: str) -> bool:
        return True

    def probe(self, name: str) -> ProbeModule:
        return self._probe

    def sae(self, name: str) -> SparseAutoencoder:
        return self._sae


class OneStream:
    """Replays by computing again into the tensors of the recording."""

    def __init__(self) -> None:
        self.recorded = 0
        self.beside: list[bool] = []
        """By recording, whether it is for the side stream."""

    def event(self) -> Any:
        return SimpleNamespace(synchronize=lambda: None)

    def record(self, work: Callable[[], Any], beside: bool) -> Any:
        found = work()
        self.recorded += 1
        self.beside.append(beside)

        def replay() -> None:
            # Light work writes to memory that its step gets.
            for old, new in zip(found or (), work() or (), strict=True):
                for name, array in new.items():
                    old[name].copy_(array)

        return replay, found

    def run(self, work: Callable[[], None], done: Any) -> None:
        work()

    run_beside = run

    def wait(self, done: Any) -> None:
        pass


class Steps:
    """The steps of a worker, with or without recordings."""

    def __init__(self, records: bool) -> None:
        model = Model()
        config, cpu = configuration(1), torch.device("cpu")
        modules: Any = Modules()
        self.readouts = worker.WorkerReadouts(
            config, modules, model, model.layers[-1], cpu
        )
        self.streams = OneStream()
        if records:
            streams: Any = self.streams
            self.readouts.recorded = RecordedSteps(
                self.readouts._operations, VOCABULARY, streams
            )
        self._layout = StepLayout(list(range(LAYERS)), SLOTS)
        self._staging = torch.full((SLOTS, HIDDEN), float("nan"))
        self._positions: dict[str, int] = {}

    def add(self, req_id: str, readouts: tuple[Readout, ...]) -> None:
        plan = ReadoutPlan(readouts)
        groups = tuple(
            LocalGroup((tap,), (tap[0],), ranges, ())
            for tap, ranges in plan.staged.items()
        )
        self._layout.add(req_id, groups)
        self.readouts.add_request(req_id, plan, groups, 1)
        self._positions[req_id] = 0

    def remove(self, req_id: str) -> None:
        self._layout.remove(req_id)
        self.readouts.remove(req_id)
        del self._positions[req_id]

    def step(self) -> PendingReadouts | None:
        """One token of each request."""
        req_ids, starts = list(self._positions), np.array([*self._positions.values()])
        view = StepView(req_ids, starts, np.ones_like(starts), len(req_ids))
        placed = self._layout.place(view)
        self._staging.fill_(float("nan"))
        if placed is not None:
            slots = slots_of(placed.layout, range(LAYERS), view.num_rows)
            for token, req_id in enumerate(req_ids):
                rows = row(req_id[0], self._positions[req_id])
                for layer in range(LAYERS):
                    if (slot := slots[layer, token]) >= 0:
                        self._staging[slot] = rows[layer]
        self.readouts.run(placed, view, self._staging, 0)
        for req_id in req_ids:
            self._positions[req_id] += 1
        return self.readouts.take()


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "get_tensor_model_parallel_rank", lambda: 0)
        group = SimpleNamespace(rank_in_group=0)
        patch.setattr(worker, "get_pp_group", lambda: group)
        patch.setattr(recorded, "RECORD_AFTER", 2)
        yield


def values(pending: PendingReadouts | None, req_ids: list[str]) -> dict[str, Any]:
    results = {} if pending is None else pending.collect()
    found = {}
    for req_id in req_ids:
        own = results.get(req_id)
        for part in () if own is None else own.parts:
            found[req_id, part.name, part.start, part.count] = {
                name: array.copy() for name, array in part.arrays.items()
            }
    return found


CHANGES = st.lists(
    st.tuples(st.sampled_from(["add", "remove"]), st.sampled_from(sorted(PLANS))),
    max_size=2,
)


class Pair:
    """The same steps with and without recordings, up to three of them in flight."""

    def __init__(self) -> None:
        self._sides = Steps(records=False), Steps(records=True)
        self._running: list[str] = []
        self._pending: list[tuple[Any, Any, list[str]]] = []

    def change(self, what: str, name: str, number: int) -> None:
        own = [req_id for req_id in self._running if req_id[0] == name]
        if what == "add":
            self._running.append(f"{name}{number}")
            for side in self._sides:
                side.add(self._running[-1], PLANS[name])
        elif own:
            self._running.remove(own[0])
            for side in self._sides:
                side.remove(own[0])

    def step(self) -> None:
        if not self._running:
            return
        plain, replayed = (side.step() for side in self._sides)
        self._pending.append((plain, replayed, list(self._running)))
        self.compare(2)

    def compare(self, left: int) -> None:
        """Compare the results of all but the last steps."""
        while len(self._pending) > left:
            plain, replayed, req_ids = self._pending.pop(0)
            expected, found = values(plain, req_ids), values(replayed, req_ids)
            assert expected.keys() == found.keys()
            for key, arrays in expected.items():
                for name, array in arrays.items():
                    np.testing.assert_array_equal(found[key][name], array)


@given(st.lists(st.tuples(CHANGES, st.integers(1, 6)), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_replayed_steps_have_the_same_results(
    phases: list[tuple[list[tuple[str, str]], int]],
) -> None:
    pair, number = Pair(), 0
    for changes, count in phases:
        for what, name in changes:
            number += 1
            pair.change(what, name, number)
        for _ in range(count):
            pair.step()
    pair.compare(0)


def run(side: Steps, count: int) -> None:
    for _ in range(count):
        pending = side.step()
        assert pending is not None
        pending.collect()


def test_steps_with_as_many_rows_share_a_recording() -> None:
    side = Steps(records=True)
    for number in range(3):
        side.add("ab"[number % 2] + str(number), (PROBE,))
    run(side, 5)
    assert side.streams.recorded == 1
    side.remove("a0")
    side.add("c3", (PROBE,))
    run(side, 5)
    assert side.streams.recorded == 1, "another job set with the same jobs"
    side.remove("b1")
    run(side, 2)
    assert side.streams.recorded == 1, "two steps are too few"
    run(side, 2)
    assert side.streams.recorded == 2
    assert side.readouts.recorded is not None
    side.readouts.recorded.forget()
    run(side, 5)
    assert side.streams.recorded == 3


def test_memory_of_results_is_used_again() -> None:
    side = Steps(records=True)
    side.add("a", (PROBE, SAE))
    run(side, 5)
    assert side.readouts.recorded is not None
    (recording,) = side.readouts.recorded._recordings.values()
    (copies,) = recording.free
    run(side, 3)
    assert recording.free == [copies]


def test_a_lens_with_tokens_is_not_recorded() -> None:
    side = Steps(records=True)
    named = Readout("named", "lens", block(1), EVERYWHERE, top_k=2, tokens=(3,))
    side.add("a", (PROBE, named))
    run(side, 8)
    assert side.streams.recorded == 0


def test_large_values_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "MOST_BYTES", 4 * 16 - 1)
    side = Steps(records=True)
    side.add("a", (SAE,))
    run(side, 8)
    assert side.streams.recorded == 0


def test_a_recording_that_fails_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    side = Steps(records=True)
    tried = 0

    def fail(work: Any, beside: bool) -> Any:
        nonlocal tried
        tried += 1
        raise RuntimeError("no graphs on this device")

    monkeypatch.setattr(side.streams, "record", fail)
    side.add("a", (PROBE,))
    run(side, 8)
    assert tried == 1


def test_a_step_in_flight_that_cannot_be_recorded_is_computed_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side, plain = Steps(records=True), Steps(records=False)
    for one in (side, plain):
        one.add("a", (PROBE,))
        run(one, 4)

    def fail(work: Any, beside: bool) -> Any:
        raise RuntimeError("no memory for a graph")

    monkeypatch.setattr(side.streams, "record", fail)
    steps = [side.step() for _ in range(3)]  # The second needs memory of its own.
    assert side.readouts.recorded is not None and side.readouts.recorded.failed
    for found in steps:
        own, expected = values(found, ["a"]), values(plain.step(), ["a"])
        assert own and own.keys() == expected.keys()
        for key, arrays in own.items():
            np.testing.assert_array_equal(arrays["values"], expected[key]["values"])


@pytest.mark.parametrize(
    ("activation", "cosine", "rows"),
    [("softmax", False, 256), ("none", True, 256), ("none", False, 0)],
)
def test_probes_that_the_kernel_cannot_compute_are_computed_beside(
    activation: Any,
    cosine: bool,
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe_kernel, "MOST_ROWS", rows)
    vectors = draw(2, HIDDEN, seed=13).numpy().tobytes()
    probe = Probe(vectors, (0.5, 0.0), activation=activation, cosine=cosine)
    own = Readout("own", "probe", block(3), EVERYWHERE, probe=probe)
    side = Steps(records=True)
    side.add("a", (own,))
    run(side, 6)
    assert side.streams.beside == [True]


def test_small_probes_are_computed_in_the_stream_of_the_forward_pass() -> None:
    side = Steps(records=True)
    side.add("a", (PROBE,))
    side.add("b", (OWN[0],))
    run(side, 6)
    assert side.streams.beside == [False]
