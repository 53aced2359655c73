# SPDX-License-Identifier: Apache-2.0
"""Compiled passes steer like eager ones, for every kind of entry."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from tests.support.compiler import needs_compiler
from tests.support.inner_reference import InnerReference
from tests.v1.steering import _engine, _models
from tests.v1.steering._engine import compared, generate, logprobs, params, tokens
from tests.v1.steering._models import vector
from tests.v1.steering.test_operations import SURE, at_rows, check

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    needs_compiler,
]

HOOKS = ("pre_attn", "post_attn", "post_block")
PROMPTS = [[(7 * i + 3 * j) % _models.VOCAB for j in range(9 + i)] for i in range(4)]
PROMPT = PROMPTS[0]


@pytest.fixture(scope="module")
def steered(
    tmp_path_factory: Any,
) -> Iterator[tuple[Any, InnerReference]]:
    path = _models.save("llama", tmp_path_factory.mktemp("llama"))
    llm = _engine.engine(
        path,
        enforce_eager=False,
        max_num_seqs=16,
        max_steering_configs=16,
    )
    assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    yield llm, InnerReference(path)
    llm.llm_engine.engine_core.shutdown()


def along(stream: torch.Tensor, direction: torch.Tensor, factor: float) -> torch.Tensor:
    unit = direction / direction.norm()
    return stream + factor * (stream @ unit)[:, None] * unit


@pytest.mark.parametrize("positions", [None, [1, 10]])
def test_operations_are_carried_out_by_compiled_code(
    steered: Any, positions: Any
) -> None:
    where = {} if positions is None else {"positions": positions}
    cases = {
        name: (
            {**entry, **where},
            at_rows(change, lambda p: positions is None or p in positions),
        )
        for name, (entry, change) in SURE.items()
    }
    check(*steered, "steering_vectors", (1, "post_block"), cases)


V = vector(5)


def test_what_adds_nothing_changes_no_bit(steered: Any) -> None:
    llm, _ = steered
    zero = {hook: {1: [0.0] * _models.HIDDEN} for hook in HOOKS}
    plain = generate(llm, PROMPTS, [params()] * 4)
    specs: list[dict[str, Any]] = [
        {"steering_vectors": zero},
        {"steering_vectors": {"pre_attn": {0: {"vector": vector(1), "scale": 0}}}},
        {"steering_vectors": {"post_attn": {0: vector(1)}}},
        {},
    ]
    same = generate(llm, PROMPTS, [params(**s) for s in specs])
    for i in (0, 1, 3):  # The third one is steered, together with the others.
        assert tokens(plain[i]) == tokens(same[i])
        assert torch.equal(logprobs(plain[i]), logprobs(same[i]))
    assert not torch.equal(logprobs(plain[2]), logprobs(same[2]))


def test_conditions_are_decided_in_compiled_code(steered: Any) -> None:
    """Probes at one place for entries at another, in prompts and generated tokens."""
    llm, reference = steered
    probe, place, acts = vector(6), (0, "post_block"), (1, "post_attn")
    middle = (reference.rows_at(PROMPT, place) @ probe).sort().values[2:-2]
    widest = int(middle.diff().argmax())
    threshold = float(middle[widest : widest + 2].mean())

    def act(stream: torch.Tensor) -> torch.Tensor:
        fires = reference.rows[place] @ probe > threshold
        return torch.where(fires[:, None], along(stream, V, -1), stream)

    when = {"probe": probe, "layer": place[0], "hook": place[1], "above": threshold}
    entry = {"vector": V, "op": "project_out", "when": when}
    asked = params(steering_vectors={acts[1]: {acts[0]: entry}})
    output, plain = generate(llm, [PROMPT] * 2, [asked, params()])
    assert compared(plain, reference, {})[0] < 1e-4
    wrong, effect = compared(output, reference, {acts: act})
    assert wrong < 1e-4 and effect > 1e-3
