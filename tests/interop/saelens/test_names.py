# SPDX-License-Identifier: Apache-2.0
"""SAEs that SAELens saved read here what they read in its own models.

What a branch adds is the output of its module only if no norm follows it.
"""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sae_lens", reason="make test-interop")

import torch
from sae_lens import SAE
from sae_lens.analysis.sae_transformer_bridge import SAETransformerBridge

from tests.interop import branches
from tests.interop.branches import TOKENS, WIDTH, captured
from vllm.steering.sae import load_sae

pytestmark = pytest.mark.interop

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


@pytest.mark.parametrize("kind", ["norms around branches", "parallel branches"])
def test_an_sae_reads_what_it_reads_in_saelens(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = branches.saved(kind, folder)
    tokens = torch.tensor([TOKENS])
    wanted = {}
    bridge = SAETransformerBridge.boot_transformers(str(folder), hf_model=model)
    for name in NAMES:
        place = f"blocks.1.{name}"
        sae = saved(tmp_path / name, hook_name=place)
        _, cache = bridge.run_with_cache_with_saes(tokens, saes=[sae])
        wanted[name] = cache[bridge.get_sae_hook_name(sae, "hook_sae_input")][0]
    if kind == "norms around branches":
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
    with captured(folder) as rows:
        for name, expected in wanted.items():
            tap = load_sae(tmp_path / name).reads.tap
            assert tap is not None
            torch.testing.assert_close(
                rows({tap[1]: [tap[0]]}),
                expected,
                rtol=1e-4,
                atol=1e-4,
                msg=lambda m, at=name: at + m,
            )
