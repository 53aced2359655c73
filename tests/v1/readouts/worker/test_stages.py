# SPDX-License-Identifier: Apache-2.0
"""Rows of earlier stages join those of the last one in one job."""

import torch

from vllm.v1.readouts.plan import Readout
from vllm.v1.readouts.worker.program import Entry, Job, no_rows
from vllm.v1.readouts.worker.stages import SEND, Arriving, StageRows, with_received

KEY = ("lens", 2, (), None)
TAPS = ((0, "post_block"), (1, "post_block"), (2, "post_block"))
WHOLE = Readout("all", "lens", TAPS, ((0, 99),), top_k=2)


def job(key: tuple[object, ...], req_id: str, taps: slice, start: int) -> Job:
    own = Readout("all", "lens", TAPS[taps], ((0, 99),))
    entry = Entry(req_id, own, start, 2, 0, no_rows(2, len(own.taps)))
    return Job(key, [entry])


def test_received_rows_come_first_and_keep_their_positions() -> None:
    sent, hidden = StageRows(), torch.zeros(1)
    assert sent.put({"hidden_states": hidden}).keys() == {"hidden_states"}
    early = torch.arange(4.0)[:, None]
    sent.add(job(SEND, "a", slice(2), 5), early, 3)
    sent.add(job(SEND, "gone", slice(1), 0), torch.zeros(2, 1), 0)
    tensors = sent.put({"hidden_states": hidden})
    arriving = Arriving.taken(tensors)
    assert arriving is not None and tensors.keys() == {"hidden_states"}
    received = arriving.opened()
    own = job(KEY, "a", slice(2, 3), 7), torch.tensor([[10.0], [11.0]])
    other = Job(("norm",), []), torch.zeros(0, 1)
    jobs, rows = with_received(
        [own[0], other[0]],
        [own[1], other[1]],
        received,
        {"a": {"all": (WHOLE, KEY)}},
        1,
    )
    assert [one.key for one in jobs] == [KEY, ("norm",)]
    assert rows[0][:, 0].tolist() == [0.0, 1.0, 2.0, 3.0, 10.0, 11.0]
    first, last = jobs[0].entries
    # Both start at position 8: 5 moved on by 3, and 7 by the 1 that is added later.
    assert (first.start, first.first, first.readout.taps) == (7, 0, TAPS[:2])
    assert (last.start, last.first, last.readout.taps) == (7, 4, TAPS[2:])
    assert Arriving.taken({"hidden_states": hidden}) is None
