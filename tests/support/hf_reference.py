# SPDX-License-Identifier: Apache-2.0
"""The residual stream in the Transformers library."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

Tap = tuple[int, str]
Stream = dict[Tap, torch.Tensor]
"""Rows `[positions, hidden_size]` by `(layer, hook)`, float32."""


def first(value: Any) -> torch.Tensor:
    """A module's output, without further values."""
    while isinstance(value, (tuple, list)):
        value = value[0]
    assert isinstance(value, torch.Tensor)
    return value


@dataclass(frozen=True, slots=True)
class Places:
    """The places of the stream in a model of the library."""

    layers: Callable[[nn.Module], nn.ModuleList]
    mid: str | None = "post_attention_layernorm"
    """The module whose input is the stream after attention; None if attention and MLP
    run in parallel."""
    attention: str = "self_attn"


@contextmanager
def changing(
    module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """A context in which the rows that enter a module are changed."""

    def hook(module: Any, args: Any, kwargs: Any) -> Any:
        return (change(args[0]), *args[1:]), kwargs

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def decoder(model: nn.Module) -> nn.ModuleList:
    """The layers, at the place of most architectures."""
    layers = model.model.layers  # type: ignore[union-attr]
    assert isinstance(layers, nn.ModuleList)
    return layers


class Reference:
    """A checkpoint, loaded by the library, with hooks at its hook points."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype = torch.float32,
        places: Places | None = None,
    ) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation="eager",
            experts_implementation="eager",  # one matrix product after another
        ).eval()
        self._seen: Stream = {}
        places = places or Places(decoder)
        for index, layer in enumerate(places.layers(self.model)):
            self._watch(index, layer, places)

    def _watch(self, index: int, layer: nn.Module, places: Places) -> None:
        def entering(module: Any, args: Any, kwargs: Any) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            self._put(index, "pre_attn", hidden)

        def middle(module: Any, args: Any) -> None:
            self._put(index, "post_attn", first(args))

        def leaving(module: Any, args: Any, output: Any) -> None:
            self._put(index, "post_block", first(output))

        layer.register_forward_pre_hook(entering, with_kwargs=True)
        layer.register_forward_hook(leaving)

        def attended(module: Any, args: Any, output: Any) -> None:
            branch = first(output).detach().float().flatten(0, -2)
            self._seen[index, "post_attn"] = self._seen[index, "pre_attn"] + branch

        if places.mid is not None:
            layer.get_submodule(places.mid).register_forward_pre_hook(middle)
        else:
            layer.get_submodule(places.attention).register_forward_hook(attended)

    def _put(self, layer: int, hook: str, hidden: torch.Tensor) -> None:
        self._seen[layer, hook] = hidden.detach().float().flatten(0, -2).clone()

    def stream(self, token_ids: Sequence[int]) -> Stream:
        """Every hook point's rows for these tokens."""
        self._seen = {}
        with torch.no_grad():
            self.model(torch.tensor([list(token_ids)]))
        return self._seen


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error of a row, relative to that row's norm in `expected`."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    if not found.numel():
        return 0.0
    return float(row_errors(found, expected).max())


def row_errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Each row's error, relative to its norm in `expected`."""
    return (found.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
