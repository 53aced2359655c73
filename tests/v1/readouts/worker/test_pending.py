# SPDX-License-Identifier: Apache-2.0
"""A step's results by request; its output is upstream's in all else."""

from itertools import pairwise
from unittest.mock import Mock

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.readouts.worker.jobs import Entry, no_rows
from vllm.v1.readouts.worker.pending import JobResult, PendingReadouts
from vllm.v1.residual.readout_plan import Kind, Readout, ReadoutPart
from vllm.v1.worker.step_additions import Additions, attach


class Output(AsyncModelRunnerOutput):
    """An output as upstream 0.33.0 has it."""

    def get_output(self) -> ModelRunnerOutput:
        return Mock(ModelRunnerOutput)

    def get_kv_connector_output(self) -> str:
        return "what was sent"


def test_an_output_with_additions_is_asked_as_the_one_within() -> None:
    output = attach(Output(), Additions(failed={"a": "its receipt failed"}))
    assert output.get_kv_connector_output() == "what was sent"
    assert output.get_output().failed == {"a": "its receipt failed"}


ARRAYS = {
    "a": ((), torch.float32),
    "b": ((3,), torch.int32),
    "c": ((2, 2), torch.float16),
    "nothing": ((0,), torch.int64),
}


@pytest.mark.parametrize("kind", ["lens", "norm", "rows", "probe", "sae"])
@given(
    st.lists(
        st.tuples(st.sampled_from("xyz"), st.integers(1, 3)), min_size=1, max_size=6
    ),
    st.sets(st.sampled_from(sorted(ARRAYS)), min_size=1),
    st.integers(1, 3),
    st.integers(0, 5),
)
def test_each_request_gets_the_values_of_its_rows(
    kind: Kind, drawn: list[tuple[str, int]], names: set[str], taps: int, shift: int
) -> None:
    """Whether a part is of one token or of several, of one array or of several."""
    taps = 1 if kind in ("probe", "sae") else taps
    places = tuple([(layer, "post_block") for layer in range(taps)])
    firsts = [0, *torch.tensor([n * taps for _, n in drawn]).cumsum(0).tolist()]
    entries = [
        Entry(req, Readout(f"{i}", kind, places, ()), i, n, first, no_rows(n, taps))
        for i, ((req, n), first) in enumerate(zip(drawn, firsts))
    ]
    arrays = {
        name: (torch.rand(firsts[-1], *shape) * 99).to(dtype)
        for name, (shape, dtype) in ARRAYS.items()
        if name in names
    }
    starts, kept = dict.fromkeys("xyz", 0), {}
    for further in (shift, shift + 1):  # The second step uses what the first has kept.
        result = JobResult(entries, further, arrays, kept=kept)
        step = PendingReadouts([result], starts, further).collect()
        sent: dict[str, ReadoutPart] = {}
        for req_id in sorted({req for req, _ in drawn}):
            found = step.get(req_id)
            assert found is not None and found.start == further
            for part in found.parts:
                part.pack()
                message = msgspec.msgpack.encode(part)
                again = msgspec.msgpack.decode(message, type=ReadoutPart)
                again.unpack()
                sent[part.name] = again
        assert step.get("w") is None and len(sent) == len(drawn)
        for i, (first, last) in enumerate(pairwise(firsts)):
            part, count = sent[str(i)], drawn[i][1]
            assert (part.start, part.count) == (i + further, count)
            for name, values in arrays.items():
                axes = (count,) if kind in ("probe", "sae") else (count, taps)
                expected = values[first:last].reshape(*axes, *values.shape[1:]).numpy()
                assert part.arrays[name].dtype == expected.dtype
                assert part.arrays[name].shape == expected.shape
                assert (part.arrays[name] == expected).all()
