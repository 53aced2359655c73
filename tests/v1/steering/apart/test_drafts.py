# SPDX-License-Identifier: Apache-2.0
"""Speculation with n-grams changes neither steered nor plain requests."""

import os
from typing import Any

import pytest
import torch

from tests.v1.steering import _engine, _models
from tests.v1.steering._engine import generate, logprobs, params, tokens
from tests.v1.steering._models import vector

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

DRAFTS = 3
V2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
SPECULATION = {
    "method": "ngram_gpu" if V2 else "ngram",
    "num_speculative_tokens": DRAFTS,
    "prompt_lookup_max": 2,
    "prompt_lookup_min": 1,
}
NEW_TOKENS = 24
PROMPTS = [[(7 * i + 3 * j) % _models.VOCAB for j in range(6)] * 4 for i in range(3)]
"""Repetitive prompts, so that drafts are proposed."""


def at(entry: Any, layer: int = 1, hook: str = "post_attn") -> dict[str, Any]:
    return {hook: {layer: entry}}


REQUESTS: list[dict[str, Any]] = [
    {},
    {"steering_vectors": at(vector(1))},
    {"prefill_steering_vectors": at(vector(2), 0, "pre_attn")},
    {"decode_steering_vectors": at(vector(3), 2, "post_block")},
    {
        "decode_steering_vectors": at({"vector": vector(4), "op": "project_out"}),
        "steering_receipt": True,
    },
    # Positions of generated tokens, some of which are drafted and some rejected.
    {
        "steering_vectors": at(
            {"vector": vector(5), "op": "replace", "positions": [23, 26, 27, 31, 40]}
        )
    },
    {"decode_steering_vectors": at({"vector": vector(6), "norm_match": True})},
]


class Drafts:
    """Counts accepted drafts by request, and rejected ones in total."""

    def __init__(self, llm: Any) -> None:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self.accepted: dict[str, int] = {}
        self.rejected = 0
        count = scheduler.make_spec_decoding_stats

        def counted(*args: Any, **kwargs: Any) -> Any:
            name, taken = kwargs["request_id"], kwargs["num_accepted_tokens"]
            self.accepted[name] = self.accepted.get(name, 0) + taken
            self.rejected += kwargs["num_draft_tokens"] - taken
            return count(*args, **kwargs)

        scheduler.make_spec_decoding_stats = counted


def outputs(path: str, **options: Any) -> tuple[list[Any], Drafts]:
    """Run each way to steer with each prompt, in one batch."""
    llm = _engine.engine(path, max_num_seqs=32, max_steering_configs=8, **options)
    drafts = Drafts(llm)
    cases = [(prompt, fields) for prompt in PROMPTS for fields in REQUESTS]
    found = generate(
        llm,
        [prompt for prompt, _ in cases],
        [params(NEW_TOKENS, **fields) for _, fields in cases],
    )
    llm.llm_engine.engine_core.shutdown()
    return found, drafts


def test_tokens_and_logprobs_are_those_without_speculation(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if V2:
        from tests.v1.capture.engine.apart import test_drafts_ahead as ahead

        monkeypatch.setattr(ahead.NgramGPUSpeculator, "propose", ahead.proposed)
    path = _models.save("llama", tmp_path)
    expected, none = outputs(path)
    found, drafts = outputs(path, speculative_config=SPECULATION)
    assert not any(none.accepted.values())
    assert drafts.rejected > 0
    assert sum(taken > 0 for taken in drafts.accepted.values()) > len(found) // 2
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert tokens(one) == tokens(other), number
        assert torch.allclose(logprobs(one), logprobs(other), rtol=1e-5, atol=1e-4)
        if one.steering is None:
            assert other.steering is None
            continue
        (entry,), (drafted,) = one.steering["applied"], other.steering["applied"]
        assert entry["tokens"] == drafted["tokens"] == NEW_TOKENS - 1
        assert drafted["dose"] == pytest.approx(entry["dose"], rel=1e-3)
