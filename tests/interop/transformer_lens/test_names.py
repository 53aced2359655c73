# SPDX-License-Identifier: Apache-2.0
"""Names of TransformerLens mean what its own bridge over Transformers reads there.

On models with a norm or a multiplier behind a branch, and on parallel ones, a name of a
branch's output could also mean the module's output, which is another value.
"""

import shutil
from pathlib import Path

import pytest
import torch
import transformers

from tests.support.models import TOKENIZER, VOCABULARY, save
from vllm import LLM, SamplingParams

pytestmark = pytest.mark.interop

TOKENS = [5, 17, 99, 42, 7, 3, 250]
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
}
CONFIGS = {
    "norms around branches": lambda: transformers.Gemma2Config(
        **SIZES, num_key_value_heads=1, head_dim=32
    ),
    "norms behind branches": lambda: transformers.Olmo2Config(
        **SIZES, num_key_value_heads=1
    ),
    "a multiplier": lambda: transformers.GraniteConfig(
        **SIZES, num_key_value_heads=1, residual_multiplier=0.22
    ),
    "parallel branches": lambda: transformers.GPTJConfig(
        vocab_size=VOCABULARY,
        n_embd=64,
        n_layer=3,
        n_head=2,
        rotary_dim=16,
        n_positions=128,
    ),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_rows_under_the_librarys_names_are_its_own(kind: str, tmp_path: Path) -> None:
    library = pytest.importorskip(
        "transformer_lens.model_bridge", reason="make test-interop"
    )
    folder = save(CONFIGS[kind](), tmp_path / "model")
    for file in TOKENIZER.glob("token*"):
        shutil.copy(file, folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    bridge = library.TransformerBridge.boot_transformers(str(folder), hf_model=model)
    _, cache = bridge.run_with_cache(torch.tensor([TOKENS]))
    names = [
        f"blocks.{layer}.hook_{name}"
        for layer in range(3)
        for name in ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
        # Parallel branches have no stream between them.
        if f"blocks.{layer}.hook_{name}" in cache
    ]
    assert len(names) >= 12
    engine = LLM(
        str(folder),
        dtype="float32",
        max_model_len=64,
        enforce_eager=True,
        gpu_memory_utilization=0.2,
        capture_consumers=["inline"],
        hook_points=["attn_add", "mlp_add"],
    )
    for name in names:
        spec = {"hooks": [name], "positions": "all_prompt"}
        params = SamplingParams(max_tokens=1, capture={"inline": spec})
        out = engine.generate({"prompt_token_ids": TOKENS}, params, use_tqdm=False)[0]
        (rows,) = out.capture_results["inline"].payload.values()
        torch.testing.assert_close(
            rows, cache[name][0], rtol=1e-4, atol=1e-4, msg=lambda m, at=name: at + m
        )
    engine.llm_engine.engine_core.shutdown()
