# SPDX-License-Identifier: Apache-2.0
"""The stream and the inside of blocks in the Transformers library, seen and changed.

The places are found by the names of submodules, independent of the fork's.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

Tap = tuple[int, str]
Change = Callable[[torch.Tensor], torch.Tensor]
"""Maps rows `[tokens, width]` to those with which the model continues."""

ATTENTION = ("self_attn", "attn")
PROJECTION = ("o_proj", "out_proj", "c_proj")
MLP = ("mlp", "block_sparse_moe")
SHARED = ("shared_expert", "shared_experts")
DOWN = ("down_proj", "fc_out", "c_proj", "output_linear")


def child(module: nn.Module, names: Sequence[str]) -> nn.Module | None:
    """The first of these submodules that there is."""
    return next(
        (getattr(module, name) for name in names if hasattr(module, name)), None
    )


def _first(value: Any) -> torch.Tensor:
    return value[0] if isinstance(value, tuple) else value


def _watch_attention(file: Any) -> None:
    """Let the modules of a file see what attention reads."""
    compute = file.eager_attention_forward
    if hasattr(compute, "is_watched"):
        return

    def hook(module: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        alone = partial(compute, module)
        watched = module.inside(alone) if hasattr(module, "inside") else alone
        return watched(q, k, v, *args, **kwargs)

    hook.is_watched = True  # type: ignore[attr-defined]
    file.eager_attention_forward = hook


class InnerReference:
    """A checkpoint, loaded by the library, that computes attention eagerly."""

    def __init__(self, source: Path | str | nn.Module) -> None:
        """Watch the model of a checkpoint, or one that is loaded."""
        if not isinstance(source, nn.Module):
            source = transformers.AutoModelForCausalLM.from_pretrained(
                source, dtype=torch.float32, attn_implementation="eager"
            )
        self.model: Any = source.eval()
        inner = getattr(self.model, "model", None) or self.model.transformer
        layers = getattr(inner, "layers", None) or inner.h
        self.rows: dict[Tap, torch.Tensor] = {}
        """Rows `[tokens, width]` of the last pass, or of what has passed of this one.

        They are as before a change at their own place.
        """
        self.patterns: dict[int, torch.Tensor] = {}
        """Weights `[heads, tokens, tokens]` of the last pass, by layer."""
        self._changes: Mapping[Tap, Change] = {}
        self._entered: dict[int, torch.Tensor] = {}
        """The stream with which each layer begins, after a change."""
        for index, layer in enumerate(layers):
            self._watch(index, layer)
        norm = child(inner, ("norm", "ln_f"))
        assert norm is not None
        self._leaving(norm, (len(layers) - 1, "final_norm"))

    def _watch(self, index: int, layer: nn.Module) -> None:
        attention, mlp = child(layer, ATTENTION), child(layer, MLP)
        assert attention is not None and mlp is not None
        projection = child(attention, PROJECTION)
        assert projection is not None
        self._entering(attention, (index, "attn_in"))
        self._leaving(attention, (index, "attn_out"))
        self._entering(projection, (index, "z"))
        self._entering(mlp, (index, "mlp_in"))
        self._leaving(mlp, (index, "mlp_out"))
        self._leaving(layer, (index, "post_block"))
        if index == 0:
            self._entering(layer, (0, "embed"))
        self._entering(layer, (index, "pre_attn"))
        # Gemma 2 adds the output of norms behind both sublayers.
        behind = hasattr(layer, "post_feedforward_layernorm")
        added = layer.post_attention_layernorm if behind else attention
        self._leaving(added, (index, "attn_add"))
        added.register_forward_hook(self._middle(index))
        self._leaving(
            layer.post_feedforward_layernorm if behind else mlp, (index, "mlp_add")
        )
        shared = child(layer, ("shared_mlp",)) or child(mlp, SHARED)
        if (down := child(shared or mlp, DOWN)) is not None:
            self._entering(down, (index, "mlp_act"))
        if (gate := child(mlp, ("gate",))) is not None:
            gate.register_forward_hook(self._router(index))
        if (experts := child(mlp, ("experts",))) is not None:
            experts.register_forward_pre_hook(self._experts(index))
        if hasattr(attention, "_attn"):
            attention._attn = self._heads(index, attention._attn)  # GPT-J
        else:
            attention.inside = partial(self._heads, index)
            _watch_attention(sys.modules[type(attention).__module__])

    def _pass(self, tap: Tap, value: torch.Tensor) -> torch.Tensor:
        rows = value.reshape(-1, value.shape[-1])
        self.rows[tap] = rows.detach().clone()
        change = self._changes.get(tap)
        return value if change is None else change(rows).reshape(value.shape)

    def _entering(self, module: nn.Module, tap: Tap) -> None:
        def hook(module: Any, args: Any, kwargs: Any) -> Any:
            value = args[0] if args else kwargs["hidden_states"]
            value = self._pass(tap, value)
            if tap[1] == "pre_attn":
                self._entered[tap[0]] = value
            if args:
                return (value, *args[1:]), kwargs
            return args, kwargs | {"hidden_states": value}

        module.register_forward_pre_hook(hook, with_kwargs=True)

    def _leaving(self, module: nn.Module, tap: Tap) -> None:
        def hook(module: Any, args: Any, output: Any) -> Any:
            changed = self._pass(tap, _first(output))
            return (changed, *output[1:]) if isinstance(output, tuple) else changed

        module.register_forward_hook(hook)

    def _middle(self, index: int) -> Callable[..., Any]:
        """After attention the stream is what entered and what is added."""

        def hook(module: Any, args: Any, output: Any) -> Any:
            before, tap = self._entered[index], (index, "post_attn")
            changed = self._pass(tap, before + _first(output)) - before
            if tap not in self._changes:
                return output
            return (changed, *output[1:]) if isinstance(output, tuple) else changed

        return hook

    def _router(self, index: int) -> Callable[..., Any]:
        def hook(module: Any, args: Any, output: Any) -> Any:
            logits = self._pass((index, "router_logits"), output[0])
            if logits is output[0]:
                return output
            chances = logits.float().softmax(-1)  # Those of Mixtral.
            weights, chosen = chances.topk(module.top_k, dim=-1)
            return logits, weights / weights.sum(-1, keepdim=True), chosen

        return hook

    def _experts(self, index: int) -> Callable[..., Any]:
        def hook(module: Any, args: tuple[torch.Tensor, ...]) -> Any:
            rows, chosen, weights = args
            self.rows[index, "expert_ids"] = chosen.float()
            return rows, chosen, self._pass((index, "expert_weights"), weights)

        return hook

    def _heads(self, index: int, compute: Callable[..., Any]) -> Callable[..., Any]:
        def hook(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            given = zip("qkv", (query, key, value))
            query, key, value = (self._by_head(index, n, part) for n, part in given)
            output, weights = compute(query, key, value, *args, **kwargs)
            self.patterns[index] = weights[0].detach().float()
            return output, weights

        return hook

    def _by_head(self, index: int, name: str, part: torch.Tensor) -> torch.Tensor:
        """One of q, k, v: `[1, heads, tokens, head_size]`."""
        _, heads, tokens, size = part.shape
        rows = self._pass((index, name), part[0].transpose(0, 1).reshape(tokens, -1))
        return rows.view(tokens, heads, size).transpose(0, 1)[None]

    def run(
        self, token_ids: Sequence[int], changes: Mapping[Tap, Change] | None = None
    ) -> torch.Tensor:
        """Logits `[tokens, words]` of a pass, whose rows can be read afterwards."""
        self.rows, self.patterns, self._changes = {}, {}, changes or {}
        with torch.no_grad():
            output = self.model(torch.tensor([list(token_ids)]), use_cache=False)
        return output.logits[0].float()

    def rows_at(self, token_ids: Sequence[int], tap: Tap) -> torch.Tensor:
        """The rows of a place in a pass without changes."""
        self.run(token_ids)
        return self.rows[tap]

    def logprobs(
        self, token_ids: Sequence[int], changes: Mapping[Tap, Change]
    ) -> torch.Tensor:
        """Log-probabilities `[tokens, words]` of a pass with changes, in float64."""
        return self.run(token_ids, changes).double().log_softmax(dim=-1)
