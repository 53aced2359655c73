# SPDX-License-Identifier: Apache-2.0
"""The converted SmolLM2, checked by abilities that only intact weights have."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from tests.support.real_model import PROSE, real_model


@pytest.fixture(scope="module")
def folder() -> Path:
    return real_model()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def test_prose_is_likely(model: LlamaForCausalLM, tokenizer: Any) -> None:
    ids = tokenizer(PROSE[:450], return_tensors="pt").input_ids
    assert model(ids, labels=ids).loss.exp() < 32


def test_the_configuration_is_the_models(model: LlamaForCausalLM) -> None:
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size) == (30, 576)
    assert (config.num_attention_heads, config.num_key_value_heads) == (9, 3)
    assert config.tie_word_embeddings and config.vocab_size == 49152
    assert config.rope_parameters["rope_theta"] == 100_000
    assert sum(weight.numel() for weight in model.parameters()) == 134_515_008


def test_the_tokenizer_restores_texts_and_splits_as_the_model_was_trained(
    tokenizer: Any,
) -> None:
    text = "Zoë's 3 cats — ünique\n\tok?  don't"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("in 2024").tokens() == ["in", "Ġ", "2", "0", "2", "4"]
    for mark in ("<|im_start|>", "<|im_end|>", "<|endoftext|>"):
        assert len(tokenizer(mark).input_ids) == 1
    assert tokenizer.eos_token == "<|im_end|>"


def test_the_chat_template_is_the_models(tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by "
        "Hugging Face<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_second_call_converts_nothing(folder: Path) -> None:
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert sys.modules["convert"].checkpoint() == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
