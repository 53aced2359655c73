# SPDX-License-Identifier: Apache-2.0
"""A model for SAELens, without SAELens."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3TextConfig

from tests.support.models import llama
from vllm.interop.first_layers import shortened
from vllm.interop.saelens import ServedModel


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("llama"))


def test_the_first_layers_alone_give_the_models_activations(folder: Path) -> None:
    served = ServedModel.start(
        str(folder),
        stop_at_layer=1,
        dtype="float32",
        max_model_len=64,
        enforce_eager=True,
    )
    assert served.cfg.n_layers == 1
    tokens = torch.randint(3, 1000, (3, 17))
    names = ["blocks.0.hook_resid_pre", "blocks.0.hook_resid_post"]
    _, cache = served.run_with_cache(tokens, names_filter=names)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        states = reference(tokens, output_hidden_states=True).hidden_states
    for name, expected in zip(names, states):
        torch.testing.assert_close(cache[name], expected, rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="not a hook point"):
        served.run_with_cache(tokens, names_filter="blocks.0.attn.hook_q")


def test_what_belongs_to_later_layers_is_cut_off_a_config() -> None:
    config = shortened(Gemma3TextConfig(num_hidden_layers=8), 3)
    assert config.num_hidden_layers == len(config.layer_types) == 3


def test_a_model_that_cannot_be_cut_off_there_is_refused() -> None:
    with pytest.raises(ValueError, match="give 1 to 8"):
        shortened(Gemma3TextConfig(num_hidden_layers=8), 9)
    with pytest.raises(ValueError, match="without stop_at_layer"):
        shortened(Gemma3Config(), 3)
