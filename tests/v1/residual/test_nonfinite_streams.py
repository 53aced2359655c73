# SPDX-License-Identifier: Apache-2.0
"""A request whose stream overflows does not affect other requests.

There are few blocks, so that every request gets blocks that hostile ones have used.
"""

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.captured import prompt
from tests.support.models import llama
from vllm import LLM, SamplingParams
from vllm.v1.residual import nonfinite_streams
from vllm.v1.residual.nonfinite_streams import Finiteness

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

WIDTH, LAYERS = 64, 4
LARGE = {"float32": 3e38, "float16": 6e4, "bfloat16": 3e38}
WORDS = 61
Answer = tuple[tuple[int, ...], list[float] | None]


class Engine:
    """An engine with 24 blocks of 32 tokens."""

    def __init__(self, folder: Any, dtype: str) -> None:
        self.large = LARGE[dtype]
        self.llm = LLM(
            model=str(llama(folder, layers=LAYERS)),
            dtype=dtype,
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=8,
            num_gpu_blocks_override=24,
            block_size=32,
            enable_steering=True,
            enable_prompt_embeds=True,
            disable_log_stats=True,
            seed=0,
        )

    def outputs(self, prompts: list[Any], **options: Any) -> list[Any]:
        chosen = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
        params = SamplingParams(logprobs=0, **chosen | options)
        return self.llm.generate(prompts, params, use_tqdm=False)

    def answers(self, prompts: list[Any], **options: Any) -> list[Answer]:
        """Tokens and log-probabilities, with all bits."""
        return [answer(output) for output in self.outputs(prompts, **options)]

    def hostile(self, *layers: int) -> dict[str, Any]:
        vector = torch.full((WIDTH,), self.large)
        return {"steering_vectors": {"post_block": dict.fromkeys(layers, vector)}}


def answer(output: Any) -> Answer:
    (sample,) = output.outputs
    numbers = [next(iter(one.values())).logprob for one in sample.logprobs or ()]
    return tuple(sample.token_ids), numbers


def reason(output: Any) -> str:
    (sample,) = output.outputs
    assert sample.finish_reason == "error", sample
    assert not sample.token_ids
    said = str(sample.stop_reason)
    assert said.startswith(nonfinite_streams.MARK)
    return said


@pytest.fixture(scope="module", params=["float32", "float16"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    engine = Engine(tmp_path_factory.mktemp("llama"), request.param)
    yield engine
    engine.llm.llm_engine.engine_core.shutdown()
    del engine.llm
    gc.collect()


def tokens(length: int, seed: int) -> Any:
    return {"prompt_token_ids": prompt(length, seed)}


VICTIMS = [tokens(length, 90 + length) for length in (5, 17, 33, 40, 61)]
HOSTILE = [tokens(WORDS, 1 + seed) for seed in range(6)]


def unchanged(engine: Engine, before: list[Answer]) -> None:
    # Different prompts of these lengths, so that the prefix cache has none of them.
    engine.llm.reset_prefix_cache()
    assert engine.answers(VICTIMS) == before


def test_an_infinite_vector_ends_its_request_and_changes_no_other(
    engine: Engine,
) -> None:
    before = engine.answers(VICTIMS)
    for output in engine.outputs(HOSTILE, **engine.hostile(0, 1)):
        assert "reached the attention of layer 2; " in reason(output)
        assert "layer 1 was finite" in reason(output)
    unchanged(engine, before)
    for output in engine.outputs(HOSTILE, **engine.hostile(2, LAYERS - 1)):
        assert f"after the attention of layer {LAYERS - 1}" in reason(output)
    unchanged(engine, before)


def test_requests_beside_a_hostile_one_have_the_same_bits(engine: Engine) -> None:
    hostile = SamplingParams(max_tokens=6, temperature=0.0, **engine.hostile(0, 1))
    plain = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=0)

    def beside(steered: list[SamplingParams]) -> list[Answer]:
        engine.llm.reset_prefix_cache()
        prompts = [*VICTIMS[:2], HOSTILE[0], *VICTIMS[2:], HOSTILE[1]]
        params = [plain, plain, steered[0], plain, plain, plain, steered[1]]
        outputs = engine.llm.generate(prompts, params, use_tqdm=False)
        return [answer(output) for output in outputs[:2] + outputs[3:6]]

    assert beside([hostile, hostile]) == beside([plain, plain])


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_embeddings_that_are_no_numbers_change_no_other(
    engine: Engine, number: float
) -> None:
    before = engine.answers(VICTIMS)
    dtype = engine.llm.llm_engine.model_config.dtype
    embeds = torch.full((WORDS, WIDTH), number, dtype=dtype)
    hostile = [{"prompt_embeds": embeds}] * 3
    for output in engine.outputs(hostile):
        assert "reached the attention of layer 0" in reason(output)
    unchanged(engine, before)


def test_a_request_that_overflows_while_it_generates_ends_there(engine: Engine) -> None:
    before = engine.answers(VICTIMS)
    vectors = engine.hostile(0, 1)["steering_vectors"]
    sampled = {"temperature": 1.0, "seed": 3}
    if "TRITON_INTERPRET" not in os.environ:  # which cannot run the kernel for these
        sampled |= {"top_p": 0.9, "top_k": 20}
    for options in ({}, sampled):
        steered = engine.outputs(HOSTILE, decode_steering_vectors=vectors, **options)
        for output in steered:
            (sample,) = output.outputs
            assert sample.finish_reason == "error"
            # The first token comes from the prompt, which is not steered.
            assert len(sample.token_ids) == 1
        unchanged(engine, before)


def test_global_vectors_that_are_too_large_leave_nothing_behind(
    engine: Engine,
) -> None:
    before = engine.answers(VICTIMS)
    engine.llm.set_steering(vectors=engine.hostile(0, 1)["steering_vectors"])
    try:
        for output in engine.outputs(HOSTILE):
            assert "layer 2" in reason(output)
    finally:
        engine.llm.clear_steering()
    unchanged(engine, before)


def test_what_one_worker_does_not_hold_another_one_does() -> None:
    # Two stages: all layers of the second one received it.
    found = nonfinite_streams.describe([Finiteness([0], [1]), Finiteness([], [2, 3])])
    assert found == (
        "NaN or infinity reached the attention of layer 1; the input of that of layer 0"
        " was finite"
    )
    assert "after the attention of layer 3" in nonfinite_streams.describe(
        [Finiteness([3], [])]
    )
