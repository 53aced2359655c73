# SPDX-License-Identifier: Apache-2.0
"""A small sparse autoencoder, trained on rows of the demo model."""

import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from demo_engine import DEMO
from safetensors.torch import save_file

from vllm import LLM, SamplingParams

sys.path.insert(0, str(DEMO))
from generate_text import documents

LAYER, FEATURES = 2, 64


def rows_of(llm: LLM, texts: list[str]) -> torch.Tensor:
    """Rows after a layer at all tokens of texts, `[tokens, hidden_size]`."""
    spec = {"hooks": {"post_block": [LAYER]}, "positions": "all_prompt"}
    params = SamplingParams(max_tokens=1, capture={"inline": spec})
    outputs = llm.generate(texts, params, use_tqdm=False)
    payloads = [one.capture_results["inline"].payload for one in outputs]
    return torch.cat([payload[LAYER, "post_block"].float() for payload in payloads])


def stories(count: int) -> Iterator[tuple[str, str]]:
    """Texts in the style of the training data, with their tones."""
    for story in islice(documents(seed=5), count):
        yield story.text, story.tone


def train(rows: torch.Tensor, folder: Path, steps: int = 400) -> float:
    """Train an SAE, write it in SAELens' form; returns its explained variance."""
    torch.manual_seed(0)
    width, centre = rows.shape[1], rows.mean(dim=0)
    w = {"W_enc": torch.randn(width, FEATURES) / width**0.5, "b_dec": centre.clone()}
    w |= {"W_dec": w["W_enc"].T.clone(), "b_enc": torch.zeros(FEATURES)}
    optimizer = torch.optim.Adam([t.requires_grad_() for t in w.values()], lr=1e-2)
    for _ in range(steps):
        active = ((rows - w["b_dec"]) @ w["W_enc"] + w["b_enc"]).relu()
        error = (active @ w["W_dec"] + w["b_dec"] - rows).square().sum()
        explained = 1 - error / (rows - centre).square().sum()
        (1 - explained + 1e-3 * active.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    tensors = {name: tensor.detach().contiguous() for name, tensor in w.items()}
    save_file(tensors, folder / "sae_weights.safetensors")
    place = f"blocks.{LAYER}.hook_resid_post"
    config = {"architecture": "standard", "hook_point": place}
    (folder / "cfg.json").write_text(json.dumps(config))
    return float(explained.detach())
