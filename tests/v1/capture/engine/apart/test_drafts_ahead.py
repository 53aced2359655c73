# SPDX-License-Identifier: Apache-2.0
"""Drafts with asynchronous scheduling, where only the device knows a step's positions.

A step is prepared before it is known how many drafts of the previous one are rejected.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import asynchronous
from tests.support.captured import CapturedEngine, asking, prompt
from tests.support.hf_reference import changing
from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator

pytestmark = pytest.mark.e2e

DRAFTS = 3


def proposed(speculator: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Propose the token that followed the last one before, or else any token.

    This replaces upstream's kernel, which Triton's interpreter cannot run.
    """
    states = speculator.req_states
    for index, request in enumerate(input_batch.idx_mapping.tolist()):
        ids = states.all_token_ids.gpu[request, : int(states.total_len.gpu[request])]
        before = (ids[:-1] == ids[-1]).nonzero().flatten()
        start = int(before[-1]) + 1 if len(before) else 0
        draft = ids[start : start + DRAFTS].to(torch.int64)
        speculator.drafts[index, : len(draft)] = draft
    return speculator.drafts[: input_batch.num_reqs]


@pytest.fixture(scope="module", params=["sync", "async"])
def ahead(request: pytest.FixtureRequest, model: Path) -> Iterator[CapturedEngine]:
    patch = pytest.MonkeyPatch()
    patch.setattr(NgramGPUSpeculator, "propose", proposed)
    with asynchronous.allowed():
        engine = CapturedEngine(
            model,
            async_scheduling=request.param == "async",
            enable_steering=True,
            enable_readouts=True,
            max_logprobs=-1,
            speculative_config={
                "method": "ngram_gpu",
                "num_speculative_tokens": DRAFTS,
                "prompt_lookup_max": 2,
                "prompt_lookup_min": 1,
            },
        )
    config = engine.llm.llm_engine.vllm_config.scheduler_config
    assert config.async_scheduling == (request.param == "async")
    yield engine
    engine.close()
    patch.undo()


class Drafts:
    """Counts drafts that were proposed and that were accepted."""

    def __init__(self, engine: CapturedEngine, monkeypatch: pytest.MonkeyPatch):
        core: Any = engine.llm.llm_engine.engine_core
        scheduler = core.engine_core.scheduler
        self.proposed = self.accepted = 0
        count = scheduler.make_spec_decoding_stats

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.proposed += kwargs["num_draft_tokens"]
            self.accepted += kwargs["num_accepted_tokens"]
            return count(*args, **kwargs)

        monkeypatch.setattr(scheduler, "make_spec_decoding_stats", counted)


SELECTED: list[tuple[Any, list[int]]] = [
    ("all", list(range(47))),
    ("all_generated", list(range(24, 47))),
    ("last_prompt", [23]),
    (list(range(0, 47, 3)), list(range(0, 47, 3))),
    ([24, 31, 46], [24, 31, 46]),
]


@pytest.mark.parametrize("positions, expected", SELECTED)
def test_rows_are_those_of_accepted_tokens(
    ahead: CapturedEngine,
    monkeypatch: pytest.MonkeyPatch,
    positions: Any,
    expected: list[int],
) -> None:
    drafts = Drafts(ahead, monkeypatch)
    prompts = [prompt(6, seed=400 + i) * 4 for i in range(4)]
    for output in ahead.run(prompts, asking(positions, max_tokens=24)):
        ahead.check(output, expected)
    assert 0 < drafts.accepted < drafts.proposed


@pytest.mark.parametrize("positions, expected", SELECTED)
def test_readouts_are_those_of_accepted_tokens(
    ahead: CapturedEngine, positions: Any, expected: list[int]
) -> None:
    asked = asking("all", max_tokens=24)
    spec = {"kind": "rows", "hooks": {"post_block": [1]}, "positions": positions}
    asked.readouts = {"rows": spec}
    for output in ahead.run([prompt(6, seed=420 + i) * 4 for i in range(4)], asked):
        found = output.readouts["rows"]
        assert found.positions == expected and found.error is None
        rows = ahead.rows(output)[1, "post_block"][expected]
        assert torch.equal(torch.from_numpy(found["rows"].copy())[:, 0], rows)


def test_functions_are_told_true_positions(ahead: CapturedEngine) -> None:
    def told(rows: torch.Tensor, context: Any) -> torch.Tensor:
        return torch.tensor(list(context.positions))

    asked = asking("last_prompt", max_tokens=24)
    taps = {"post_block": [1]}
    asked.readouts = {
        name: {"kind": "custom", "fn": told, "hooks": taps, "positions": positions}
        for name, positions in (("all", "all"), ("some", [24, 31, 46]))
    }
    for output in ahead.run([prompt(6, seed=430 + i) * 4 for i in range(3)], asked):
        for found in output.readouts.values():
            assert found["values"].tolist() == found.positions != []


def test_steering_acts_at_the_generated_positions_that_are_named(
    ahead: CapturedEngine,
) -> None:
    named = [26, 27, 30, 35]
    entry = {"vector": [1.0] * 64, "op": "replace", "positions": named}
    asked = asking("all", max_tokens=16)
    asked.steering_vectors = {"pre_attn": {1: entry}}

    def replaced(hidden: torch.Tensor) -> torch.Tensor:
        return hidden.index_fill(1, torch.tensor(named), 1.0)

    outputs = ahead.run([prompt(6, seed=410 + i) * 4 for i in range(3)], asked)
    layer = ahead.reference.model.model.layers[1]
    with changing(layer, replaced):
        for output in outputs:
            ahead.check(output)
    with pytest.raises(AssertionError):
        ahead.check(outputs[0])


def test_a_receipt_has_the_token_at_which_a_readout_ends_a_request(
    ahead: CapturedEngine,
) -> None:
    taken = [prompt(6, seed=400)[i % 6] for i in range(24)]
    ones = [[1.0] * 64]
    probe = {"kind": "probe", "layer": 1, "hook": "post_block", "vectors": ones}
    asked = asking("last_prompt", max_tokens=24)
    asked.readouts = {"sum": probe}
    entry = {"vector": torch.arange(64.0), "op": "project_out"}
    asked.decode_steering_vectors = {"post_attn": {0: entry}}
    asked.steering_receipt = True
    (output,) = ahead.run([taken], asked)
    values = output.readouts["sum"]["values"][:, 0].tolist()
    ends = [k for k, v in enumerate(values) if k == 0 or v > max(values[:k])]
    assert len(ends) > 2
    ended = [asked.clone() for _ in ends]
    for end, one in zip(ends, ended, strict=True):
        bound = (values[end] + max(values[:end], default=values[0] - 1)) / 2
        one.stop_when = [{"readout": "sum", "above": bound}]
    for end, output in zip(ends, ahead.run([taken] * len(ends), ended), strict=True):
        assert len(output.outputs[0].token_ids) == end + 1
        (applied,) = output.outputs[0].steering["applied"]
        assert applied["tokens"] == end + 1
