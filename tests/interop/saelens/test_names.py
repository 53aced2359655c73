# SPDX-License-Identifier: Apache-2.0
"""SAEs that SAELens saved read here what they read in its own models.

What a branch adds is the output of its module only if no norm follows it.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sae_lens", reason="make test-interop")

import torch
import transformers
from sae_lens import SAE
from sae_lens.analysis.sae_transformer_bridge import SAETransformerBridge

from tests.support.models import TOKENIZER, VOCABULARY, save
from vllm import LLM, SamplingParams
from vllm.steering.sae import load_sae

pytestmark = pytest.mark.interop

TOKENS = [5, 17, 99, 42, 7, 3, 250]
WIDTH = 64
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
}
CONFIGS = {
    "norms behind branches": lambda: transformers.Gemma2Config(
        **SIZES, num_key_value_heads=1, head_dim=32
    ),
    "parallel branches": lambda: transformers.GPTJConfig(
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=2,
        n_head=2,
        rotary_dim=16,
        n_positions=128,
    ),
}
NAMES = ["hook_resid_pre", "hook_attn_out", "hook_mlp_out", "hook_resid_post"]


def saved(folder: Path, **metadata: str) -> SAE[Any]:
    """An SAE with this place, as SAELens writes it to a folder."""
    given = {
        "architecture": "standard",
        "d_in": WIDTH,
        "d_sae": 8,
        "device": "cpu",
        "dtype": "float32",
        "metadata": metadata,
    }
    sae = SAE.from_dict(given)
    sae.save_model(folder)
    return sae


@pytest.mark.parametrize("kind", CONFIGS)
def test_an_sae_reads_what_it_reads_in_saelens(kind: str, tmp_path: Path) -> None:
    folder = save(CONFIGS[kind](), tmp_path / "model")
    for file in TOKENIZER.glob("token*"):
        shutil.copy(file, folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = torch.tensor([TOKENS])
    wanted = {}
    bridge = SAETransformerBridge.boot_transformers(str(folder), hf_model=model)
    for name in NAMES:
        place = f"blocks.1.{name}"
        sae = saved(tmp_path / name, hook_name=place)
        _, cache = bridge.run_with_cache_with_saes(tokens, saes=[sae])
        wanted[name] = cache[bridge.get_sae_hook_name(sae, "hook_sae_input")][0]
    if kind == "norms behind branches":
        # As SAELens converts Gemma Scope 2's SAEs of MLPs: both names.
        exact = "model.layers.1.post_feedforward_layernorm"
        names = {
            "hook_name": "blocks.1.hook_mlp_out",
            "hf_hook_name": f"{exact}.output",
        }
        saved(tmp_path / exact, **names)
        norm = model.get_submodule(exact)
        found: list[torch.Tensor] = []
        hook = norm.register_forward_hook(lambda _m, _i, out: found.append(out[0]))
        with torch.no_grad():
            model(tokens)
        hook.remove()
        wanted[exact] = found[0].detach()
    engine = LLM(
        str(folder),
        dtype="float32",
        max_model_len=64,
        enforce_eager=True,
        gpu_memory_utilization=0.2,
        capture_consumers=["inline"],
        hook_points=["attn_add", "mlp_add"],
    )
    for name, expected in wanted.items():
        tap = load_sae(tmp_path / name).reads.tap
        assert tap is not None
        spec = {"hooks": {tap[1]: [tap[0]]}, "positions": "all_prompt"}
        params = SamplingParams(max_tokens=1, capture={"inline": spec})
        out = engine.generate({"prompt_token_ids": TOKENS}, params, use_tqdm=False)[0]
        (rows,) = out.capture_results["inline"].payload.values()
        torch.testing.assert_close(
            rows, expected, rtol=1e-4, atol=1e-4, msg=lambda m, at=name: at + m
        )
    engine.llm_engine.engine_core.shutdown()
