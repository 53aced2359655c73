# SPDX-License-Identifier: Apache-2.0
"""Layers that run several times per pass: each run counts as a layer."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.captured import CapturedEngine, asking
from tests.support.hf_reference import Reference, Stream, first, relative_error
from tests.support.models import save

pytestmark = pytest.mark.e2e

PROMPT = list(range(5, 16))
PER_STACK, STEPS = 2, 6


def config() -> transformers.PreTrainedConfig:
    return transformers.HrmTextConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=PER_STACK,
        num_attention_heads=2,
        head_dim=32,
        H_cycles=2,
        L_cycles=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=None,
    )


class Runs(Reference):
    """The library's stream, with a layer for each run in the order of the pass."""

    def __init__(self, folder: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._seen: Stream = {}

        def ran(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            layer = len(self._seen) // 2
            self._put(layer, "pre_attn", args[0] if args else kwargs["hidden_states"])
            self._put(layer, "post_block", first(output))

        for module in self.model.modules():
            if type(module).__name__ == "HrmTextDecoderLayer":
                module.register_forward_hook(ran, with_kwargs=True)

    def prompt(self, token_ids: list[int]) -> Stream:
        """The rows of every run, with attention in both directions, as in upstream."""
        self._seen = {}
        ids = torch.tensor([token_ids])
        with torch.no_grad():
            self.model(ids, token_type_ids=torch.ones_like(ids))
        return self._seen


def test_each_run_of_a_layer_is_captured_as_the_library_counts_it(
    tmp_path: Path,
) -> None:
    model = save(config(), tmp_path)
    expected = Runs(model).prompt(PROMPT)
    engine = CapturedEngine(
        model,
        max_model_len=64,
        skip_tokenizer_init=True,
        reference=Runs(model),
    )
    params = asking("all_prompt", max_tokens=1, detokenize=False)
    (output,) = engine.run([PROMPT], params)
    rows = engine.rows(output)
    engine.close()
    assert {layer for layer, _ in rows} == set(range(PER_STACK * STEPS))
    for tap, wanted in expected.items():
        assert relative_error(rows[tap], wanted) < 1e-4, tap
    runs_of_one_layer = (rows[0, "post_block"], expected[2, "post_block"])
    assert relative_error(*runs_of_one_layer) > 1e-3
