# SPDX-License-Identifier: Apache-2.0
"""Names of TransformerLens mean what its own bridge over Transformers reads there."""

from pathlib import Path

import pytest
import torch

from tests.interop.branches import CONFIGS, LAYERS, TOKENS, captured, saved

pytestmark = pytest.mark.interop


@pytest.mark.parametrize("kind", CONFIGS)
def test_rows_under_the_librarys_names_are_its_own(kind: str, tmp_path: Path) -> None:
    library = pytest.importorskip(
        "transformer_lens.model_bridge", reason="make test-interop"
    )
    model = saved(kind, tmp_path)
    bridge = library.TransformerBridge.boot_transformers(str(tmp_path), hf_model=model)
    _, cache = bridge.run_with_cache(torch.tensor([TOKENS]))
    names = [
        f"blocks.{layer}.hook_{name}"
        for layer in range(LAYERS)
        for name in ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
        # Parallel branches have no stream between them.
        if f"blocks.{layer}.hook_{name}" in cache
    ]
    assert len(names) >= 12
    with captured(tmp_path) as rows:
        for name in names:
            torch.testing.assert_close(
                rows([name]),
                cache[name][0],
                rtol=1e-4,
                atol=1e-4,
                msg=lambda m, at=name: at + m,
            )
