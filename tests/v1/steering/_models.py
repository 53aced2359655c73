# SPDX-License-Identifier: Apache-2.0
"""Tiny random models and vectors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.inner_reference import Change
from tests.support.models import SIZES

HIDDEN = 64
LAYERS = 3
VOCAB = 128


def llama_config() -> transformers.PretrainedConfig:
    """Pre-norm blocks; vLLM carries the stream as a pair."""
    return transformers.LlamaConfig(**_common())


def gpt2_config() -> transformers.PretrainedConfig:
    """GPT-2: vLLM carries the stream as one tensor."""
    return transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=HIDDEN, n_layer=LAYERS, n_head=2, n_positions=512
    )


def _common(**options: Any) -> dict[str, Any]:
    own = {"vocab_size": VOCAB, "num_hidden_layers": LAYERS}
    return SIZES | own | {"max_position_embeddings": 512} | options


def qwen3_config() -> transformers.PretrainedConfig:
    """Qwen3: norms of queries and keys."""
    return transformers.Qwen3Config(**_common())


def gemma3_config() -> transformers.PretrainedConfig:
    """Gemma 3: branches are normalized before they are added; layers of both kinds."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return transformers.Gemma3TextConfig(
        **_common(query_pre_attn_scalar=32, sliding_window=16, layer_types=kinds)
    )


def mixtral_config() -> transformers.PretrainedConfig:
    """Mixtral: experts with a router."""
    return transformers.MixtralConfig(
        **_common(num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    )


def cohere_config() -> transformers.PretrainedConfig:
    """Cohere: attention and MLP in parallel, on the same input."""
    return transformers.CohereConfig(
        **_common(tie_word_embeddings=True, logit_scale=1.0)
    )


CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": llama_config,
    "qwen3": qwen3_config,
    "gemma3": gemma3_config,
    "mixtral": mixtral_config,
    "gpt2": gpt2_config,
    "cohere": cohere_config,
}

QUICK = ("llama", "gpt2")
"""The models of `make test`: the stream as a pair, and as one tensor."""


def matrix() -> list[Any]:
    """The models as parameters of a fixture; `make test-soak` runs the other ones."""
    marks = {kind: () if kind in QUICK else (pytest.mark.soak,) for kind in CONFIGS}
    return [pytest.param(kind, marks=marks[kind]) for kind in sorted(CONFIGS)]


def save(kind: str, folder: Path) -> str:
    """Save a random model with large weights and so with uneven logits."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        CONFIGS[kind](), dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    model.save_pretrained(folder)
    return str(folder)


def vector(seed: int, size: float = 1.0) -> torch.Tensor:
    """A random vector."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(HIDDEN, generator=generator) * size


def add_by_phase(
    prompt_length: int, prefill: torch.Tensor | None, decode: torch.Tensor | None
) -> Change:
    """Adds one vector at prompt tokens and another one at generated tokens."""

    def change(stream: torch.Tensor) -> torch.Tensor:
        changed = stream.clone()
        if prefill is not None:
            changed[:prompt_length] += prefill.to(stream.dtype)
        if decode is not None:
            changed[prompt_length:] += decode.to(stream.dtype)
        return changed

    return change
