# SPDX-License-Identifier: Apache-2.0
"""Weights that are loaded while the engine runs: nothing of earlier ones is served."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.adapters import RANK, adapter
from tests.support.models import llama, randomise
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROMPT = [3 + (7 * i) % 500 for i in range(300)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("model"), tie_word_embeddings=True)


@contextmanager
def started(model: Path, **options: Any) -> Iterator[LLM]:
    """An engine whose head on a CPU has a packed copy of its weights."""
    llm = LLM(
        str(model),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=512,
        enable_prefix_caching=True,
        **options,
    )
    yield llm
    llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[LLM]:
    with started(model, enable_lora=True, max_lora_rank=RANK) as llm:
        yield llm


def first_token(llm: LLM, lora: LoRARequest | None = None) -> tuple[int, float]:
    """The cached tokens of the prompt, and the log-probability of the next token."""
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=1)
    (output,) = llm.generate(
        [{"prompt_token_ids": PROMPT}], params, lora_request=lora, use_tqdm=False
    )
    logprobs: Any = output.outputs[0].logprobs
    found = logprobs[0][output.outputs[0].token_ids[0]].logprob
    return output.num_cached_tokens or 0, found


def test_an_adapter_that_is_loaded_again_does_not_find_its_earlier_blocks(
    engine: LLM, model: Path, tmp_path: Path
) -> None:
    adapter(model, tmp_path, seed=5)
    lora = LoRARequest("a", 1, str(tmp_path))
    engine.llm_engine.add_lora(lora)
    cached, before = first_token(engine, lora)
    plain = first_token(engine)
    assert first_token(engine, lora)[0] > cached == 0
    adapter(model, tmp_path, seed=6, scale=0.3)
    engine.llm_engine.add_lora(LoRARequest("a", 1, str(tmp_path), load_inplace=True))
    cached, after = first_token(engine, lora)
    assert cached == 0 and after != before
    cached, again = first_token(engine, lora)
    assert cached > 0 and again == pytest.approx(after, abs=0.05)
    cached, same = first_token(engine)
    assert cached > 0 and same == pytest.approx(plain[1], abs=0.05)


def test_weights_that_are_loaded_again_reach_tied_heads_and_no_cached_block_is_used(
    engine: LLM, model: Path, tmp_path: Path
) -> None:
    first_token(engine)
    other = transformers.AutoModelForCausalLM.from_pretrained(model)
    randomise(other, seed=1)
    other.to(torch.bfloat16).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, tmp_path)
    engine.collective_rpc("reload_weights", kwargs={"weights_path": str(tmp_path)})
    cached, found = first_token(engine)
    assert cached == 0
    with started(tmp_path) as fresh:
        assert found == pytest.approx(first_token(fresh)[1], abs=0.02)
