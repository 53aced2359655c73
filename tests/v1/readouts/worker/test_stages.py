# SPDX-License-Identifier: Apache-2.0
"""What earlier stages send arrives at the last one as it was."""

from typing import Any

import pytest
import torch

from vllm.v1.readouts.worker.jobs import Entry, Job, JobKey, no_rows
from vllm.v1.readouts.worker.pending import JobResult, PendingReadouts
from vllm.v1.readouts.worker.stages import (
    SEND,
    ReceivedStageMessage,
    StageMessage,
    joined_jobs,
    make_joined_set,
)
from vllm.v1.residual.readout_plan import Readout

KEY = ("lens", 2, (), None)
TAPS = ((0, "post_block"), (1, "post_block"), (2, "post_block"))
WHOLE = Readout("all", "lens", TAPS, ((0, 99),), top_k=2)


def entry(req_id: str, readout: Readout, start: int, count: int = 2) -> Entry:
    return Entry(req_id, readout, start, count, 0, no_rows(count, len(readout.taps)))


def job(key: JobKey, req_id: str, taps: slice, start: int) -> Job:
    return Job(key, [entry(req_id, Readout("all", "rows", TAPS[taps], ()), start)])


def passed_on(message: StageMessage) -> StageMessage:
    hidden = torch.zeros(1)
    tensors = message.put({"hidden_states": hidden})
    assert all(isinstance(one, torch.Tensor) for one in tensors.values())
    incoming = ReceivedStageMessage.taken(tensors)
    assert incoming is not None and tensors.keys() == {"hidden_states"}
    return incoming.opened()


def test_a_joined_set_serves_the_steps_of_its_batch() -> None:
    def places(more: int) -> list[Any]:
        message = StageMessage()
        message.add_rows(job(SEND, "a", slice(2), 5), None, 3 + more)
        message.add_rows(job(SEND, "a", slice(2, 3), 7), None, 1 + more)
        return message.places

    joined = {"a": {"all": (WHOLE, KEY)}}
    made = make_joined_set(places(0), joined, 1, torch.from_numpy)
    ((only, where),) = made.jobs
    assert [(one.first, one.start) for one in only.entries] == [(0, 7)]
    assert made.fits(places(0), 1) and made.fits(places(4), 5)
    assert not made.fits(places(4), 1)
    assert not made.fits(places(0)[:1], 1)
    early, late = torch.zeros(4, 1), torch.ones(2, 1)
    assert made.rows([early, late], where)[:, 0].tolist() == [0, 0, 1, 0, 0, 1]
    with pytest.raises(RuntimeError, match="failed to send"):
        made.rows([late], where)


def test_a_rank_without_rows_knows_the_jobs() -> None:
    message = StageMessage()
    message.add_rows(job(SEND, "a", slice(3), 5), None, 0)
    received = passed_on(message)
    ((made, index),) = joined_jobs(received.places, {"a": {"all": (WHOLE, KEY)}}, 0)
    assert not received.rows and len(index) == made.entries[0].num_rows == 6


DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool, torch.float64])
def test_results_arrive_as_they_were(dtype: torch.dtype) -> None:
    values = torch.arange(15).reshape(3, 5).to(dtype)
    readout = Readout("p", "probe", TAPS[:1], ((0, 99),), params="not sent")
    result = JobResult(
        [entry("a", readout, 4, 3), entry("b", readout, 7, 1)],
        2,
        {"values": values, "more": torch.arange(3, dtype=torch.uint8)},
        {1: "failed"},
    )
    message = StageMessage(results=[result, JobResult([entry("a", readout, 0)], 0, {})])
    found, empty = passed_on(passed_on(message)).results
    assert torch.equal(found.arrays["values"], values) and not empty.arrays
    assert found.arrays["values"].dtype == dtype and found.errors == {1: "failed"}
    first, second = found.entries
    assert found.shift == 0 and (first.start, second.start) == (6, 9)
    assert (first.count, first.req_id, first.readout.taps) == (3, "a", TAPS[:1])


def rows_of(taps: tuple[Any, ...], reduced: bool) -> JobResult:
    """Rows whose values are their layers, and those of their hook points."""
    one = Entry("a", Readout("r", "rows", taps, ()), 4, 2, 0, no_rows(2, 0), reduced)
    layers = torch.tensor([[10.0 * layer + len(hook)] for layer, hook in taps])
    return JobResult(
        [one], 0, {"rows": layers[None] if reduced else layers.repeat(2, 1)}
    )


@pytest.mark.parametrize("failed", [0, 1])
def test_an_error_of_one_stage_is_that_of_its_readout_alone(failed: int) -> None:
    taps = ((0, "b"), (1, "b"))
    results = [rows_of((tap,), False) for tap in taps]
    results[failed].errors, results[failed].arrays = {0: "no room"}, {}
    split = {"a": {"r": taps}}
    pending = PendingReadouts([*results, rows_of(TAPS, False)], {"a": 4}, split=split)
    other = Readout("other", "rows", TAPS, ())
    pending.results[2].entries = [Entry("a", other, 4, 2, 0, no_rows(2, 0))]
    found = pending.collect().get("a")
    assert found is not None
    good, part = found.parts
    assert (part.error, part.start, part.count) == ("no room", 4, 2)
    assert not part.arrays
    assert good.name == "other" and good.arrays["rows"].shape == (2, 3, 1)
    missing = PendingReadouts([rows_of(taps[:1], False)], {"a": 4}, split=split)
    assert missing.collect().get("a") is None
