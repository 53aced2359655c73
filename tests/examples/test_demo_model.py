# SPDX-License-Identifier: Apache-2.0
"""The demo model: its text, its tone scorer, its committed weights, its training."""

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

DEMO = Path(__file__).parents[2] / "examples" / "demo_model"
WEIGHTS = DEMO / "weights"
sys.path.insert(0, str(DEMO))  # the examples are scripts, not an installed package

from generate_text import (  # noqa: E402
    Document,
    documents,
    neutral_openings,
    vocabulary,
    words_of,
)
from scenes import KIN  # noqa: E402
from text_tokenizer import SPECIAL_TOKENS  # noqa: E402
from tone import CHEERFUL_WORDS, GLOOMY_WORDS, tone_score  # noqa: E402
from train import main as train_main  # noqa: E402


def take(count: int, seed: int) -> list[Document]:
    return list(islice(documents(seed), count))


@pytest.fixture(autouse=True)
def _one_thread_and_any_kernel() -> Iterator[None]:
    """Use one thread, the fastest for a small model; training sets both for good."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(WEIGHTS, padding_side="left")


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32).eval()


@torch.no_grad()
def write(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[str]
) -> list[str]:
    """Greedy continuations, without their prompts."""
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    ids = model.generate(**inputs, max_new_tokens=100, do_sample=False)
    return tokenizer.batch_decode(
        ids[:, inputs.input_ids.shape[1] :], skip_special_tokens=True
    )


def test_openings_have_no_tone_and_the_rest_has_the_documents_tone() -> None:
    for document in take(1000, seed=7):
        rest = document.text.removeprefix(document.opening)
        score = tone_score(rest)
        assert len(rest) < len(document.text)
        assert tone_score(document.opening) == 0, document.opening
        assert (score if document.tone == "cheerful" else -score) > 0.9, rest


def test_the_tone_words_are_words_of_the_generator_and_never_in_both_lists() -> None:
    assert vocabulary() >= CHEERFUL_WORDS | GLOOMY_WORDS
    assert not CHEERFUL_WORDS & GLOOMY_WORDS


@pytest.mark.parametrize(
    ("text", "score"),
    [("", 0), ("Happy, GLAD!", 1), ("sad", -1), ("happy but sad", 0), ("house", 0)],
)
def test_the_score_is_the_balance_of_tone_words(text: str, score: float) -> None:
    assert tone_score(text) == score


def test_the_committed_folder_is_small() -> None:
    assert sum(file.stat().st_size for file in WEIGHTS.iterdir()) < 6_000_000
    assert (WEIGHTS / "model.safetensors").stat().st_size < 4_000_000


def test_the_configuration_is_a_llama_that_cpu_attention_can_run(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert model.config.head_dim % 32 == 0
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_the_tokenizer_restores_any_text_and_keeps_marks_whole(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    text = "Zoë's 3 cats — ünique\n\tok?"
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    for mark in SPECIAL_TOKENS:
        assert len(tokenizer(mark, add_special_tokens=False).input_ids) == 1


def test_the_chat_template_is_the_form_of_the_training_text(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Good day."},
        {"role": "user", "content": "How are you?"},
    ]
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|bos|><|system|>Be kind.<|user|>Hello.<|assistant|>Good day.<|eos|>"
        "<|user|>How are you?<|assistant|>"
    )


def test_greedy_stories_are_readable_not_repetitive_and_end(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    known = vocabulary()
    for text in write(model, tokenizer, neutral_openings(16, seed=21)):
        sentences = text.strip().removesuffix(".").split(". ")
        assert set(words_of(text)) <= known, text
        assert len(sentences) >= 3, text
        assert len(set(sentences)) == len(sentences), text
        assert text.endswith("."), f"no end within 100 tokens: {text}"
        assert abs(tone_score(text)) > 0.5, text


def test_chat_answers_keep_to_the_question(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    # The tokenizer adds bos, as in the completions route.
    question = "<|user|>{}<|assistant|>"
    asked = ("How was the weather?", "How are you?", "How is your sister?")
    weather, mood, kin = write(model, tokenizer, [question.format(q) for q in asked])
    weather_words = {"weather", "sky", "sun", "sunshine", "wind", "rain"}
    assert weather_words & set(words_of(weather)), weather
    assert mood.startswith("I "), mood
    # The model is too small to remember which relative the question names.
    assert any(f"my {relative}" in kin.lower() for relative in KIN), kin


def test_a_tiny_training_run_writes_a_model_that_loads(tmp_path: Path) -> None:
    tiny = (
        "--steps 2 --batch-tokens 200 --length 64 --hidden-size 64 --layers 1"
        " --tokenizer-documents 50 --threads 1"
    )
    train_main([*tiny.split(), "--out", str(tmp_path)])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    ids = tokenizer("Anna went home.", return_tensors="pt").input_ids
    assert model.dtype == torch.bfloat16
    assert model(ids).logits.isfinite().all()
    assert "license: apache-2.0" in (tmp_path / "README.md").read_text()
