# SPDX-License-Identifier: Apache-2.0
"""Tiny random models, and transformers steered by hooks as the reference."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers

HIDDEN = 64
LAYERS = 3
VOCAB = 128

Tap = tuple[int, str]
Change = Callable[[torch.Tensor], torch.Tensor]
"""From the stream `[tokens, hidden]` to what the model goes on with."""


def llama_config() -> transformers.PretrainedConfig:
    """Pre-norm blocks; vLLM carries a pair."""
    return transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
    )


def gpt2_config() -> transformers.PretrainedConfig:
    """vLLM carries one stream."""
    return transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=HIDDEN, n_layer=LAYERS, n_head=2, n_positions=512
    )


CONFIGS = {"llama": llama_config, "gpt2": gpt2_config}


def save(kind: str, folder: Path) -> str:
    """A random model with large weights, so that its logits are far from even."""
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


class Reference:
    """A model of transformers whose stream can be changed at any hook point."""

    def __init__(self, path: str, dtype: torch.dtype = torch.float32) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype
        ).eval()
        inner = getattr(self.model, "model", None) or self.model.transformer
        self.layers = getattr(inner, "layers", None) or inner.h

    @torch.no_grad()
    def logprobs(
        self, token_ids: list[int], changes: Mapping[Tap, Change]
    ) -> torch.Tensor:
        """Log-probabilities `[tokens, vocab]` with the stream changed at taps."""
        with ExitStack() as stack:
            for (layer, hook), change in changes.items():
                handle = self._attach(self.layers[layer], hook, change)
                stack.callback(handle.remove)
            logits = self.model(torch.tensor([token_ids])).logits[0]
        return torch.log_softmax(logits.double(), dim=-1)

    def _attach(self, layer: torch.nn.Module, hook: str, change: Change) -> Any:
        if hook == "pre_attn":
            return layer.register_forward_pre_hook(
                lambda _, args: (change(args[0][0])[None], *args[1:])
            )
        if hook == "post_block":
            return layer.register_forward_hook(lambda _, __, out: _first(out, change))
        streams: list[torch.Tensor] = []
        layer.register_forward_pre_hook(lambda _, args: streams.append(args[0][0]))
        attention = getattr(layer, "self_attn", None) or layer.attn

        def after_attention(_: Any, __: Any, out: Any) -> Any:
            before = streams[-1]
            return _first(out, lambda branch: change(before + branch) - before)

        return attention.register_forward_hook(after_attention)


def _first(out: Any, change: Change) -> Any:
    if isinstance(out, tuple):
        return (change(out[0][0])[None], *out[1:])
    return change(out[0])[None] if out.dim() == 3 else change(out)


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
