# SPDX-License-Identifier: Apache-2.0
"""Captured rows of a trained model, with norms over four orders of magnitude."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tests.support.captured import CapturedEngine, asking
from tests.support.hf_reference import Reference, row_errors
from tests.support.real_model import PROSE, real_model
from vllm import SamplingParams

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SINK_LAYERS = range(12, 28)
"""After these blocks the first token's row is some hundred times as large as others."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(real_model())


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(real_model())


@pytest.fixture(scope="module")
def engine(reference: Reference) -> Iterator[CapturedEngine]:
    opened = CapturedEngine(
        real_model(),
        reference=reference,
        max_model_len=2048,
        max_num_batched_tokens=512,
        max_num_seqs=4,
    )
    yield opened
    opened.close()


def test_every_hook_point_has_the_librarys_rows(
    engine: CapturedEngine, tokenizer: Any
) -> None:
    ids = tokenizer(PROSE[:160]).input_ids
    (output,) = engine.run([ids], asking(max_tokens=4))
    engine.check(output)
    rows = engine.rows(output)
    assert len(rows) == 3 * 30
    sinks = [rows[layer, "post_block"].norm(dim=-1) for layer in SINK_LAYERS]
    assert all(norms[0] > 20 * norms[1:].median() for norms in sinks)


def test_the_channels_beside_an_outlier_are_right_too(
    engine: CapturedEngine, tokenizer: Any
) -> None:
    ids = tokenizer(PROSE[:160]).input_ids
    (output,) = engine.run([ids], asking(max_tokens=1))
    wanted = engine.reference.stream(ids)
    for layer in SINK_LAYERS:
        found, right = (
            stream[layer, "post_block"] for stream in (engine.rows(output), wanted)
        )
        loud = right.abs().amax(dim=0).topk(8).indices
        assert float(right[0, loud[0]].abs()) > 10_000
        quiet = torch.ones(right.shape[-1], dtype=torch.bool)
        quiet[loud] = False
        assert float(row_errors(found[:, quiet], right[:, quiet]).max()) < 1e-3


@pytest.mark.real
def test_a_long_prompt_in_chunks(engine: CapturedEngine, tokenizer: Any) -> None:
    ids = tokenizer(PROSE * 8).input_ids[:1400]
    (output,) = engine.run([ids], asking(max_tokens=8, hooks={"post_block": "all"}))
    engine.check(output, tolerance=3e-4)


@pytest.mark.real
def test_chats_capture_what_the_template_makes_of_them(
    engine: CapturedEngine, tokenizer: Any
) -> None:
    chats = [
        [{"role": "user", "content": text}]
        for text in ("What is the capital of France?", "Write a line about rain.")
    ]
    outputs = engine.llm.chat(
        chats,  # type: ignore[arg-type]
        asking(max_tokens=24, ignore_eos=False),
        use_tqdm=False,
    )
    assert "Paris" in outputs[0].outputs[0].text
    for chat, output in zip(chats, outputs, strict=True):
        assert output.prompt_token_ids == tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=False
        )
        engine.check(output, tolerance=3e-4)


@pytest.mark.real
def test_greedy_answers_are_the_librarys(
    engine: CapturedEngine, tokenizer: Any
) -> None:
    ids = tokenizer(PROSE[:300]).input_ids
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    (output,) = engine.run([ids], params)
    with torch.no_grad():
        expected = engine.reference.model.generate(
            torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=None
        )
    assert list(output.outputs[0].token_ids) == expected[0, len(ids) :].tolist()


@pytest.mark.real
def test_the_stream_of_a_block_is_that_which_enters_the_next(
    engine: CapturedEngine, tokenizer: Any
) -> None:
    ids = tokenizer(PROSE[300:500]).input_ids
    (output,) = engine.run([ids], asking(max_tokens=2))
    rows = engine.rows(output)
    for layer, following in pairwise(range(30)):
        assert torch.equal(rows[layer, "post_block"], rows[following, "pre_attn"])


@pytest.mark.real
def test_in_bfloat16_rows_are_as_near_as_the_librarys_own(
    reference: Reference, tokenizer: Any
) -> None:
    ids = tokenizer(PROSE[:400]).input_ids
    exact = reference.stream(ids)
    half = Reference(real_model(), torch.bfloat16).stream(ids)
    opened = CapturedEngine(real_model(), reference=reference, dtype="bfloat16")
    try:
        (output,) = opened.run([ids], asking(max_tokens=1))
        for tap, rows in opened.rows(output).items():
            assert rows.dtype == torch.bfloat16
            ours = row_errors(rows, exact[tap]).mean()
            theirs = row_errors(half[tap], exact[tap]).mean()
            assert float(ours) < 1.5 * float(theirs) + 1e-3, (tap, ours, theirs)
    finally:
        opened.close()
