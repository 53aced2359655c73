# SPDX-License-Identifier: Apache-2.0
"""A model for SAELens, without SAELens."""

from pathlib import Path

import pytest
import torch
from transformers import Gemma3Config, Gemma3TextConfig

from vllm.interop.first_layers import shortened
from vllm.interop.saelens import ServedModel

NAME = "blocks.0.hook_resid_post"


@pytest.fixture(scope="module")
def served(model: Path) -> ServedModel:
    options = {"dtype": "float32", "max_model_len": 64, "enforce_eager": True}
    return ServedModel.start(str(model), stop_at_layer=1, **options)


def test_the_first_layers_alone_give_the_models_activations(reference, served) -> None:
    assert served.cfg.n_layers == 1
    tokens = torch.randint(3, 1000, (3, 17))
    names = ["blocks.0.hook_resid_pre", "blocks.0.hook_resid_post"]
    _, cache = served.run_with_cache(tokens, names_filter=names)
    with torch.no_grad():
        states = reference(tokens, output_hidden_states=True).hidden_states
    for name, expected in zip(names, states):
        torch.testing.assert_close(cache[name], expected, rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="--hook-points q"):
        served.run_with_cache(tokens, names_filter="blocks.0.attn.hook_q")


def test_arguments_that_would_change_the_result_are_refused(served) -> None:
    tokens = torch.randint(3, 1000, (2, 9))
    inert = {"remove_batch_dim": False, "pos_slice": None, "reset_hooks_end": False}
    whole = {"attention_mask": torch.ones_like(tokens), "padding_side": "right"}
    _, plain = served.run_with_cache(tokens, names_filter=NAME)
    _, same = served.run_with_cache(tokens, NAME, device="cpu", **inert, **whole)
    assert torch.equal(plain[NAME], same[NAME])
    _, elsewhere = served.run_with_cache(tokens, NAME, device="meta")
    assert elsewhere[NAME].is_meta
    with pytest.raises(TypeError, match=r"run_with_cache\(\): pos_slice=0"):
        served.run_with_cache(tokens, NAME, pos_slice=0)
    with pytest.raises(ValueError, match="prompts of one length"):
        served.run_with_cache(tokens, NAME, attention_mask=tokens * 0)
    with pytest.raises(TypeError, match=r"to_tokens\(\): padding_side='left'"):
        served.to_tokens(["a", "a b c"], padding_side="left")
    assert torch.equal(served.to_tokens("a"), served.to_tokens("a", prepend_bos=None))


def test_it_runs_where_saelens_compiles_it(served) -> None:
    tokens = torch.randint(3, 1000, (2, 9))
    _, plain = served.run_with_cache(tokens, names_filter=NAME)
    _, compiled = torch.compile(served.run_with_cache)(tokens, names_filter=NAME)
    assert torch.equal(plain[NAME], compiled[NAME])


def test_what_saelens_evaluation_asks_for_is_refused_with_a_remedy(served) -> None:
    tokens = torch.randint(3, 1000, (2, 9))
    with pytest.raises(NotImplementedError, match="runner.evaluator = None"):
        served(tokens, return_type="both", loss_per_token=True)
    with pytest.raises(NotImplementedError, match="runner.evaluator = None"):
        served.run_with_hooks(tokens, fwd_hooks=[(NAME, lambda rows, hook: rows)])


def test_what_belongs_to_later_layers_is_cut_off_a_config() -> None:
    config = shortened(Gemma3TextConfig(num_hidden_layers=8), 3)
    assert config.num_hidden_layers == len(config.layer_types) == 3


def test_a_model_that_cannot_be_cut_off_there_is_refused() -> None:
    with pytest.raises(ValueError, match="give 1 to 8"):
        shortened(Gemma3TextConfig(num_hidden_layers=8), 9)
    with pytest.raises(ValueError, match="without stop_at_layer"):
        shortened(Gemma3Config(), 3)
