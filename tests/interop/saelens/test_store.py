# SPDX-License-Identifier: Apache-2.0
"""SAELens' store and training runner with a served model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sae_lens", reason="make test-interop")

import torch
from datasets import Dataset
from sae_lens import (
    LanguageModelSAERunnerConfig,
    LanguageModelSAETrainingRunner,
    LoggingConfig,
    StandardTrainingSAEConfig,
)
from sae_lens.training.activations_store import ActivationsStore

from vllm import LLM
from vllm.interop.saelens import ServedModel

pytestmark = pytest.mark.interop

HOOK = "blocks.1.hook_resid_post"
CONTEXT = 32


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[ServedModel]:
    options = {"dtype": "float32", "max_model_len": 128, "enforce_eager": True}
    llm = LLM(str(model), capture_consumers=["inline"], **options)
    yield ServedModel(llm)
    llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def corpus() -> Dataset:
    return Dataset.from_dict(
        {"input_ids": torch.randint(3, 1000, (64, CONTEXT)).tolist()}
    )


def test_the_store_holds_the_models_activations(reference, served, corpus) -> None:
    store = ActivationsStore(
        model=served,
        dataset=corpus,
        streaming=False,
        hook_name=HOOK,
        hook_head_index=None,
        context_size=CONTEXT,
        d_in=64,
        n_batches_in_buffer=2,
        total_training_tokens=4096,
        store_batch_size_prompts=4,
        train_batch_size_tokens=64,
        prepend_bos=False,
        normalize_activations="none",
        device=torch.device("cpu"),
        dtype="float32",
    )
    tokens = store.get_batch_tokens(4)
    activations = store.get_activations(tokens)
    with torch.no_grad():
        expected = reference(tokens, output_hidden_states=True).hidden_states[2]
    torch.testing.assert_close(activations, expected, rtol=0, atol=1e-4)
    assert store.next_batch().shape == (64, 64)


def config_of(folder: Path, **more: Any) -> LanguageModelSAERunnerConfig[Any]:
    return LanguageModelSAERunnerConfig(
        sae=StandardTrainingSAEConfig(d_in=64, d_sae=128, l1_coefficient=0.1),
        model_name="served",
        hook_name=HOOK,
        dataset_path="unused",
        context_size=CONTEXT,
        prepend_bos=False,
        training_tokens=2048,
        train_batch_size_tokens=256,
        store_batch_size_prompts=4,
        n_batches_in_buffer=16,
        checkpoint_path=str(folder),
        output_path=str(folder / "output"),
        logger=LoggingConfig(log_to_wandb=False),
        device="cpu",
        **more,
    )


@pytest.mark.parametrize("ahead", [False, 2])
def test_an_sae_trains_from_it(served, corpus, tmp_path: Path, ahead: int) -> None:
    """Also where SAELens asks for batches ahead, on a thread of its own."""
    config = config_of(tmp_path, prefetch_llm_batches=ahead)
    runner = LanguageModelSAETrainingRunner(
        config, override_dataset=corpus, override_model=served
    )
    sae = runner.run()
    assert sae.W_enc.shape == (64, 128)
    assert torch.isfinite(sae.W_enc).all()


def test_text_becomes_tokens_with_and_without_bos(served) -> None:
    with_bos = served.to_tokens("Anna went home.")
    without = served.to_tokens("Anna went home.", prepend_bos=False)
    assert with_bos[0, 0] == served.tokenizer.bos_token_id
    assert with_bos[0, 1:].tolist() == without[0].tolist()
