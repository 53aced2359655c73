# SPDX-License-Identifier: Apache-2.0
"""An engine with one readout module of each kind, and reference values."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.support.captured import CapturedEngine
from tests.v1.residual.sae import _layouts
from vllm import RequestOutput, SamplingParams
from vllm.v1.readouts.modules import save_probe, save_translator
from vllm.v1.residual.sae import SparseAutoencoder, load_sae

HIDDEN, LAYERS, FEATURES, K = 64, 3, 200, 6


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Modules:
    """Files of modules, and their content."""

    folder: Path
    vectors: torch.Tensor
    bias: torch.Tensor
    maps: Mapping[int, torch.Tensor]
    saes: Mapping[str, SparseAutoencoder]

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of an engine with all modules."""
        names = ("direction", "tuned")
        files = {name: str(self.folder / f"{name}.safetensors") for name in names}
        saes = {name: str(self.folder / name) for name in self.saes}
        return {"readout_modules": files, "sae": saes}


def write_modules(folder: Path) -> Modules:
    vectors, bias = draw(2, HIDDEN, seed=1), draw(2, seed=2)
    save_probe(folder / "direction.safetensors", vectors, bias, layer=1)
    maps = {layer: draw(HIDDEN, HIDDEN, seed=layer) * 0.02 for layer in range(LAYERS)}
    save_translator(folder / "tuned.safetensors", maps, residual=True)
    parts = _layouts.parts(3, HIDDEN, FEATURES)
    names = ("W_enc", "W_dec", "b_enc", "b_dec")
    place = {"hook_name": "blocks.1.hook_resid_post"}
    _layouts.saelens(
        folder / "jump",
        _layouts.chosen(parts, *names, "threshold"),
        architecture="jumprelu",
        metadata=place,
    )
    _layouts.saelens(
        folder / "topk",
        _layouts.chosen(parts, *names),
        architecture="topk",
        k=K,
        metadata=place,
    )
    saes = {name: load_sae(folder / name) for name in ("jump", "topk")}
    return Modules(folder, vectors, bias, maps, saes)


def read_out(
    engine: CapturedEngine,
    prompts: list[list[int]],
    readouts: dict[str, Any],
    **options: Any,
) -> list[RequestOutput]:
    chosen = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 8} | options
    return engine.run(prompts, SamplingParams(readouts=readouts, **chosen))


def stream(
    engine: CapturedEngine, output: RequestOutput, hook: str = "post_block"
) -> torch.Tensor:
    """Rows of all layers, computed by Transformers, `[tokens, layers, hidden]`."""
    assert output.prompt_token_ids is not None
    fed = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    found = engine.reference.stream(fed)
    return torch.stack([found[layer, hook] for layer in range(LAYERS)], dim=1)
