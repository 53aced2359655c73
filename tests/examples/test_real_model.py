# SPDX-License-Identifier: Apache-2.0
"""The converted SmolLM2, checked by abilities that only intact weights have."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from tests.support.real_model import PROSE, real_model

KNOWN = {
    "What is the capital of France?": "Paris",
    "What is 2 + 3?": "5",
    "What is the capital of Japan?": "Tokyo",
}


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
def perplexity(model: LlamaForCausalLM, tokenizer: Any) -> float:
    ids = tokenizer(PROSE[:450], return_tensors="pt").input_ids
    return float(model(ids, labels=ids).loss.exp())


def test_the_configuration_is_the_models(model: LlamaForCausalLM) -> None:
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size) == (30, 576)
    assert (config.num_attention_heads, config.num_key_value_heads) == (9, 3)
    assert config.tie_word_embeddings and config.vocab_size == 49152
    assert config.rope_parameters["rope_theta"] == 100_000
    assert sum(weight.numel() for weight in model.parameters()) == 134_515_008


def test_prose_is_likely_and_with_rows_of_q_and_k_in_gguf_order_it_is_not(
    model: LlamaForCausalLM, tokenizer: Any
) -> None:
    assert perplexity(model, tokenizer) < 32
    kept = {name: weight.clone() for name, weight in model.state_dict().items()}
    try:
        for layer in model.model.layers:
            attention = layer.self_attn
            for projection in (attention.q_proj, attention.k_proj):
                rows = projection.weight.data
                halves = rows.view(rows.shape[0] // 64, 2, 32, -1)
                projection.weight.data = halves.swapaxes(1, 2).reshape(rows.shape)
        assert perplexity(model, tokenizer) > 80
    finally:
        model.load_state_dict(kept)


def test_it_answers_what_everybody_knows(
    model: LlamaForCausalLM, tokenizer: Any
) -> None:
    chats = [[{"role": "user", "content": question}] for question in KNOWN]
    tokenizer.padding_side = "left"
    inputs = tokenizer.apply_chat_template(
        chats,
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
        padding=True,
    )
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    answers = tokenizer.batch_decode(ids[:, inputs.input_ids.shape[1] :])
    for (question, known), answer in zip(KNOWN.items(), answers, strict=True):
        assert known in answer, (question, answer)


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


def test_pairs_of_rotated_rows_come_half_a_head_apart(folder: Path) -> None:
    assert str(folder)  # the conversion's folder is importable now
    (halves_from_pairs,) = (sys.modules["convert"].halves_from_pairs,)
    rows = np.arange(2 * 6)[:, None] * np.ones((1, 3))  # two heads of six rows
    assert halves_from_pairs(rows, 2)[:, 0].tolist() == [
        *(0, 2, 4, 1, 3, 5),
        *(6, 8, 10, 7, 9, 11),
    ]


def test_a_second_call_converts_nothing(folder: Path) -> None:
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert sys.modules["convert"].checkpoint() == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
