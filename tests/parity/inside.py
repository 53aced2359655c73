# SPDX-License-Identifier: Apache-2.0
"""What the Transformers library computes inside its blocks, recorded by hooks.

Nothing here is told where an architecture has these values. The function that a
library's file calls for attention says what attention reads and returns, and which
module calls it; the MLP's second projection is the last linear module that is met
outside of attention; a router is a linear module of that
name, whose logits are computed again from its input and weights.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

INSIDE = (
    "attn_in",
    "q",
    "k",
    "v",
    "z",
    "attn_out",
    "mlp_act",
    "router_logits",
    "expert_ids",
    "expert_weights",
    "final_norm",
)
"""The points that are recorded here, in the order of a pass."""
ROUTERS = ("gate", "router")
BESIDE = ("per_layer", "altup")
"""Parts of names of linear modules that are neither attention's nor an MLP's."""
_IN_PAIRS = "the library has the numbers of a head in another order"
DIFFERING: Mapping[str, Mapping[str, str]] = {
    "BloomForCausalLM": {"attn_out": "the library adds the stream to it there"},
    "FalconForCausalLM sequential": {"attn_out": "upstream adds its bias afterwards"},
    "Llama4ForCausalLM": {"q": _IN_PAIRS, "k": _IN_PAIRS},
    "Llama4ForConditionalGeneration": {"q": _IN_PAIRS, "k": _IN_PAIRS},
    "MiniCPM3ForCausalLM": {
        "v": "upstream pads values to the size of queries",
        "z": "upstream pads values to the size of queries",
        "final_norm": "the library divides it before the unembedding",
    },
    "OPTForCausalLM": {"q": "the library's queries have the scale of attention"},
    "WhisperForConditionalGeneration": {
        "q": "the library's queries have the scale of attention"
    },
    "PaliGemmaForConditionalGeneration": {
        "q": "the library counts positions from 1",
        "k": "the library counts positions from 1",
    },
}
"""By architecture, or one's variant: points that the library computes otherwise."""
Tap = tuple[int, str]


class Inside:
    """The rows inside of the blocks of a model, of its last pass."""

    def __init__(
        self, model: Any, layers: Sequence[nn.Module], attention: Sequence[str]
    ) -> None:
        """Watch a model.

        Args:
            model: the library's, with eager attention.
            layers: its decoder layers, each of which runs once in a pass.
            attention: names of the attention module in a layer, for files without a
                function of attention.
        """
        self.rows: dict[Tap, torch.Tensor] = {}
        """`[tokens, width]` float32."""
        self._ambiguous: set[Tap] = set()
        for index, layer in enumerate(layers):
            core = _core(layer, attention)
            if core is not None:
                self._watch_attention(index, core)
            self._watch_mlp(index, layer, core)
        unembedding = model.get_output_embeddings()
        if unembedding is not None:
            self._entering(unembedding, (len(layers) - 1, "final_norm"))

    def begin(self) -> None:
        """Forget the last pass."""
        self.rows = {}
        self._ambiguous = set()

    def end(self) -> dict[Tap, torch.Tensor]:
        """The rows of the pass, without those that were met more than once."""
        for tap in self._ambiguous:
            del self.rows[tap]
        return in_order_of_experts(self.rows)

    def _put(self, tap: Tap, value: torch.Tensor) -> None:
        if tap in self.rows:
            self._ambiguous.add(tap)
        self.rows[tap] = value.detach().float().reshape(-1, value.shape[-1]).clone()

    def _entering(self, module: nn.Module, tap: Tap) -> None:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._put(tap, _stream(args, kwargs))

        module.register_forward_pre_hook(hook, with_kwargs=True)

    def _watch_attention(self, index: int, core: nn.Module) -> None:
        def leaving(module: nn.Module, args: Any, output: Any) -> None:
            output = output[0] if isinstance(output, tuple) else output
            self._put((index, "attn_out"), output)

        self._entering(core, (index, "attn_in"))
        core.register_forward_hook(leaving)
        if hasattr(core, "_attn"):  # As of GPT-J: heads are its first axis.
            compute = core._attn

            def attend(q: Any, k: Any, v: Any, *more: Any, **named: Any) -> Any:
                self._attended(index, q, k, v)
                output, weights = compute(q, k, v, *more, **named)
                self._put((index, "z"), output[0].transpose(0, 1).flatten(1))
                return output, weights

            core._attn = attend
            return
        if not _calls_attention(core):
            for module in core.modules():
                if isinstance(module, (nn.Linear, Conv1D)):
                    self._watch_last(module, (index, "z"))
            return
        core.reads_and_returns = (  # type: ignore[assignment]
            partial(self._attended, index),
            lambda z: self._put((index, "z"), z[0].flatten(1)),
        )
        _watch_file(sys.modules[type(core).__module__])

    def _attended(self, index: int, *parts: torch.Tensor) -> None:
        """Queries, keys and values, `[1, heads, tokens, size]`."""
        for name, part in zip("qkv", parts):
            self._put((index, name), part[0].transpose(0, 1).flatten(1))

    def _watch_mlp(self, index: int, layer: nn.Module, core: nn.Module | None) -> None:
        inside = set(core.modules()) if core is not None else set()
        for name, module in layer.named_modules():
            if name.rpartition(".")[2] == "experts":
                module.register_forward_pre_hook(self._experts(index), with_kwargs=True)
            if module in inside or not isinstance(_weight(module), torch.Tensor):
                continue
            if set(name.split(".")) & set(ROUTERS) and _weight(module).shape[0] > 1:
                self._watch_router(index, module)
            elif _projects(name, module):
                self._watch_last(module, (index, "mlp_act"))

    def _watch_router(self, index: int, module: Any) -> None:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            rows = _stream(args, kwargs)
            bias = getattr(module, "bias", None)
            logits = functional.linear(rows, module.weight.to(rows.dtype), bias)
            self._put((index, "router_logits"), logits)

        module.register_forward_pre_hook(hook, with_kwargs=True)

    def _experts(self, index: int) -> Any:
        """Experts are given the rows, the chosen ones and their weights."""

        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            given = [one for one in (*args, *kwargs.values()) if torch.is_tensor(one)]
            if len(given) == 3 and not given[1].is_floating_point():
                self._put((index, "expert_ids"), given[1])
                self._put((index, "expert_weights"), given[2])

        return hook

    def _watch_last(self, module: nn.Module, tap: Tap) -> None:
        """Of several such modules the one that is met last counts."""

        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            self.rows.pop(tap, None)
            self._put(tap, args[0])

        module.register_forward_hook(hook)


def in_order_of_experts(rows: dict[Tap, torch.Tensor]) -> dict[Tap, torch.Tensor]:
    """The rows with the chosen experts of each token in ascending order."""
    found = dict(rows)
    for layer, hook in rows:
        places = (layer, "expert_ids"), (layer, "expert_weights")
        if hook == "expert_ids" and places[1] in rows:
            order = rows[places[0]].argsort(dim=-1)
            found |= {place: rows[place].gather(-1, order) for place in places}
    return found


def _projects(name: str, module: nn.Module) -> bool:
    """Whether a module may be the MLP's second projection: no expert's, and no gate."""
    linear = isinstance(module, (nn.Linear, Conv1D))
    beside = "experts" in name.split(".") or any(part in name for part in BESIDE)
    return linear and not beside and _weight(module).shape[0] > 1


def _weight(module: nn.Module) -> Any:
    weight = module._parameters.get("weight")
    return weight if weight is not None and weight.dim() == 2 else None


def _core(layer: nn.Module, names: Sequence[str]) -> nn.Module | None:
    """The module of a layer that computes softmax attention."""
    own = [one for one in layer.modules() if _calls_attention(one)]
    if len(own) > 1:  # One of them may read an encoder's output.
        own = [one for one in own if getattr(one, "is_causal", False)]
    if len(own) == 1:
        return own[0]
    found = (getattr(layer, name, None) for name in names)
    return next((one for one in found if isinstance(one, nn.Module)), None)


def _calls_attention(module: nn.Module) -> bool:
    """Whether the forward of a module calls its file's function of attention."""
    code = getattr(type(module).forward, "__wrapped__", type(module).forward).__code__
    return "eager_attention_forward" in code.co_names or hasattr(module, "_attn")


def _watch_file(file: Any) -> None:
    """Let the modules of a file see what attention reads and returns."""
    compute = getattr(file, "eager_attention_forward", None)
    if compute is None or hasattr(compute, "is_watched_inside"):
        return

    def watched(module: Any, q: Any, k: Any, v: Any, *more: Any, **named: Any) -> Any:
        reads, returns = getattr(module, "reads_and_returns", (None, None))
        if reads is not None:
            reads(q, k, v)
        output, weights = compute(module, q, k, v, *more, **named)
        if returns is not None:
            returns(output)
        return output, weights

    watched.is_watched_inside = True  # type: ignore[attr-defined]
    file.eager_attention_forward = watched


def _stream(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """The first argument that is a tensor of floats."""

    def tensors() -> Iterator[torch.Tensor]:
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                yield value

    given = kwargs.get("hidden_states")
    return next(tensors()) if given is None else given
