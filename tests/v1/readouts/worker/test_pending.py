# SPDX-License-Identifier: Apache-2.0
"""A step's results by request; its output is upstream's in all else."""

from itertools import chain, pairwise
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.readouts.firing import kept_spans
from vllm.v1.readouts.results import ReadoutResult
from vllm.v1.readouts.worker.jobs import Entry, no_rows
from vllm.v1.readouts.worker.pending import LENS_FAILED, JobResult, PendingReadouts
from vllm.v1.readouts.worker.top_tokens import BEST, best_of
from vllm.v1.residual.readout_plan import (
    KeepWhen,
    Kind,
    Readout,
    ReadoutPart,
    StopWhen,
)
from vllm.v1.residual.spans import OPEN_END, merged
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


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_without_numbers_are_errors_of_their_requests(ranks: int) -> None:
    logits = torch.randn(5, 40)
    logits[1], logits[2, 7], logits[3, 39] = -torch.inf, torch.inf, torch.nan
    size = 40 // ranks
    parts = [best_of(logits[:, i : i + size], 2, (3,), i) for i in range(0, 40, size)]
    lens = Readout("lens", "lens", ((0, "post_block"),), (), top_k=2, tokens=(3,))
    entries = [Entry(f"{i}", lens, 9, 1, i, no_rows(1, 1)) for i in range(5)]
    result = JobResult(entries, 0, {BEST: torch.stack(parts)})
    step = PendingReadouts([result], dict.fromkeys("01234", 9)).collect()
    for number in range(5):
        found = step.get(f"{number}")
        assert found is not None
        (part,) = found.parts
        assert part.error == (LENS_FAILED if number in (1, 2, 3) else "")
        if not part.error:
            part.unpack()
            best = logits[number].argmax().item()
            assert part.arrays["token_ids"][0, 0, 0] == best


READ: dict[str, tuple[Kind, dict[str, Any], list[int]]] = {
    "probe": ("probe", {}, [0, 2]),
    "some features": ("sae", {"features": (4, 7)}, [4, 7]),
    "top features": ("sae", {"top_k": 2}, [0, 1, 5]),
    "norm": ("norm", {"alone": ((1, "post_block"), (2, "post_block"))}, [0, 1]),
    "two layers": ("norm", {}, [0, 1]),
    "lens": ("lens", {"tokens": (8, 9, 10)}, [0, 2, 4, 5]),
    "custom": ("custom", {}, [0, 2, 9]),
}
"""Kind, options, and the indices that rules name, of which one may not exist."""


def values_read(
    kind: Kind, options: dict[str, Any], counts: list[int], staged: int
) -> Any:
    """Arrays of a job, of few numbers, so that some are equal to a bound."""
    rows = sum(counts)
    some = (torch.randint(0, 5, (rows, 3)) / 10).masked_fill(
        torch.rand(rows, 3) < 0.1, torch.nan
    )
    if kind == "custom":
        return {str(i): part for i, part in enumerate(some.split(counts))}
    if kind in ("norm", "lens"):
        values = torch.cat([some.reshape(-1)] * 3)
        values = values[torch.randperm(len(values))]
        if kind == "norm":
            return {"norm": values[: rows * staged]}
        # NaN would be an error.
        logprobs = values[: rows * staged * 3].nan_to_num(0.1)
        return {"token_logprobs": logprobs.reshape(-1, 3)}
    if "top_k" in options:
        features = torch.rand(rows, 6).argsort(1)[:, :2]
        return {"features": features, "activations": some[:, :2].clone()}
    return {"activations" if kind == "sae" else "values": some}


@pytest.mark.parametrize("read", sorted(READ))
@given(st.data())
def test_rules_keep_in_a_step_what_they_keep_at_the_end(
    read: str, data: st.DataObject
) -> None:
    kind, options, indices = READ[read]
    layers = range(1, 3) if kind in ("norm", "lens") else range(1)
    taps = tuple((layer, "post_block") for layer in layers)
    readout = Readout("r", kind, taps, (), **options)
    staged = len(readout.staged)
    counts = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    firsts = [0, *(torch.tensor(counts).cumsum(0) * staged).tolist()]
    entries = [
        Entry(f"q{i}", readout, 7 * i, count, first, no_rows(count, staged))
        for i, (count, first) in enumerate(zip(counts, firsts))
    ]
    bounds = st.sampled_from([0.0, 0.1, 0.2, 0.3])
    rules = {
        entry.req_id: [
            KeepWhen("a", StopWhen("r", above, below, index), "token", before, after)
            for above, below, index, before, after in data.draw(
                st.lists(
                    st.tuples(
                        st.none() | bounds,
                        st.none() | bounds,
                        st.sampled_from(indices),
                        st.integers(0, 3),
                        st.integers(0, 3),
                    ),
                    max_size=2,
                )
            )
        ]
        for entry in entries
    }
    cached: dict[Any, Any] = {}
    for shift in (3, 4):  # The second step uses what the first has kept.
        arrays = values_read(kind, options, counts, staged)
        told: list[Any] = []
        pending = PendingReadouts(
            [JobResult(entries, shift, arrays, kept=cached)],
            {entry.req_id: entry.start for entry in entries},
            shift,
            rules=rules,
            told=told.append,
        )
        parts = pending.collect()
        (fired,) = told
        for entry in entries:
            found = parts.get(entry.req_id)
            assert found is not None
            (part,) = found.parts
            part.unpack()
            positions = list(range(part.start, part.start + part.count))
            result = ReadoutResult("r", positions=positions, arrays=part.arrays)
            spans = [kept_spans(keep, readout, result) for keep in rules[entry.req_id]]
            own = [(start, stop) for req, start, stop in fired if req == entry.req_id]
            assert merged(own) == merged(chain(*spans))
        pending.failed("it failed")
        assert set(told[1]) == {(req, 0, OPEN_END) for req, own in rules.items() if own}
