# SPDX-License-Identifier: Apache-2.0
"""Positions 0 to P+N-2 are captured once and in order, whatever the engine does."""

from typing import Any

import pytest
import torch

from tests.support.captured import CapturedEngine, asking, prompt
from vllm import SamplingParams

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    "positions, expected",
    [
        ("last_prompt", [6]),
        ("all_prompt", list(range(7))),
        ("all_generated", [7, 8, 9]),
        ("all", list(range(10))),
        ([0, 3, 6, 7, 9], [0, 3, 6, 7, 9]),
        ("last_generated", [9]),
        ({"last": 2}, [5, 6]),
        ([-7, -1, 8], [0, 6, 8]),
        ({"ranges": [[-3, -2], [7, 8]]}, [4, 5, 7, 8]),
    ],
)
def test_a_selector_delivers_its_rows(
    engine: CapturedEngine, positions: Any, expected: list[int]
) -> None:
    (output,) = engine.run([prompt(7, seed=1)], asking(positions, max_tokens=4))
    assert output.capture_results["keeper"].status == "ok"  # type: ignore[attr-defined]
    assert len(engine.rows(output)) == 9
    engine.check(output, expected)


def test_one_generated_token_has_no_row_of_its_own(engine: CapturedEngine) -> None:
    (output,) = engine.run([prompt(5, seed=2)], asking("all", max_tokens=1))
    engine.check(output, range(5))
    (output,) = engine.run([prompt(5, seed=3)], asking("all_generated", max_tokens=1))
    engine.check(output, [])
    (output,) = engine.run([prompt(5, seed=3)], asking("last_generated", max_tokens=1))
    engine.check(output, [])


def test_the_first_block_is_given_the_embedding_bit_for_bit(
    engine: CapturedEngine,
) -> None:
    (output,) = engine.run([prompt(7, seed=4)], asking("all_prompt", {"pre_attn": [0]}))
    embedding = engine.reference.model.get_input_embeddings()
    exact = embedding(torch.tensor(output.prompt_token_ids))
    assert torch.equal(engine.rows(output)[0, "pre_attn"], exact)


def test_requests_with_and_without_capture_share_steps(engine: CapturedEngine) -> None:
    plain = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    prompts = [prompt(20 + i, seed=50 + i) for i in range(6)]
    params = [asking("all") if i % 2 else plain for i in range(6)]
    outputs = engine.run(prompts, params)
    for i, output in enumerate(outputs):
        if i % 2:
            engine.check(output)
        else:
            assert output.capture_results is None  # type: ignore[attr-defined]


def test_capture_does_not_change_what_is_generated(engine: CapturedEngine) -> None:
    prompts = [prompt(30 + i, seed=70 + i) for i in range(3)]
    plain = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    without = engine.run(prompts, plain)
    captured = engine.run(prompts, asking("all", max_tokens=8))
    for one, other in zip(without, captured):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids


def test_different_layers_at_different_positions(engine: CapturedEngine) -> None:
    hooks = {"blocks.2.hook_resid_pre": None, "resid_post": "0-1"}
    (output,) = engine.run([prompt(40, seed=5)], asking([0, 30, 41], hooks))
    assert sorted(engine.rows(output)) == [
        (0, "post_block"),
        (1, "post_block"),
        (2, "pre_attn"),
    ]
    engine.check(output, [0, 30, 41])


def test_a_stop_token_ends_the_rows(engine: CapturedEngine) -> None:
    free = engine.run([prompt(12, seed=6)], asking("all", max_tokens=10))[0]
    ids = list(free.outputs[0].token_ids)
    stop = next(token for token in ids[3:] if ids.index(token) >= 3)
    (output,) = engine.run(
        [prompt(12, seed=6)], asking("all", max_tokens=10, stop_token_ids=[stop])
    )
    assert output.outputs[0].finish_reason == "stop"
    assert len(output.outputs[0].token_ids) == ids.index(stop) + 1
    engine.check(output)


def test_a_stop_string_ends_the_rows(engine: CapturedEngine) -> None:
    free = engine.run([prompt(12, seed=7)], asking("all", max_tokens=10))[0]
    tokenizer = engine.llm.get_tokenizer()
    ids = list(free.outputs[0].token_ids)
    text = tokenizer.decode(ids[:6])
    stop = text[len(tokenizer.decode(ids[:4])) :]
    (output,) = engine.run(
        [prompt(12, seed=7)], asking("all", max_tokens=10, stop=[stop])
    )
    assert output.outputs[0].finish_reason == "stop"
    assert len(output.outputs[0].token_ids) < 10
    engine.check(output)
    (output,) = engine.run(
        [prompt(12, seed=7)], asking("last_generated", max_tokens=10, stop=[stop])
    )
    engine.check(output, [12 + len(output.outputs[0].token_ids) - 2])
