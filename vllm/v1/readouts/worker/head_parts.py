# SPDX-License-Identifier: Apache-2.0
"""What single heads add to the logits of tokens, in float32.

Attention adds a linear function of its heads' `z` to the stream: the output projection,
and where a norm or a multiplier follows, that with the scale that it has at the token.
Without this a user captures `z`, 8 KiB a layer and token of an 8B model, and needs the
weights of every projection and norm beside the engine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

UNITS = 1024
"""Unit vectors that go through a projection at a time."""
TOLERANCE = 0.02
"""Largest relative difference between what attention adds and its linear form."""


@dataclass(frozen=True, slots=True)
class Form:
    """What a norm makes of rows `[n, H]` at a fixed scale: `scale * own + bias`.

    Its weights are read each time, because others may be loaded.
    """

    norm: Any = None
    """None if there is no norm, but perhaps a multiplier."""
    added: int = 0
    """What it adds to its weights."""
    centers: bool = False
    """Whether it subtracts the mean."""

    @property
    def weight(self) -> torch.Tensor | float:
        """What rows are multiplied by: `[H]` float32, or a number."""
        weight = getattr(self.norm, "weight", None)
        return 1.0 if weight is None else self.added + weight.float()

    @property
    def bias(self) -> torch.Tensor | float:
        """What is added at the end: `[H]` float32, or a number."""
        bias = getattr(self.norm, "bias", None)
        return 0.0 if bias is None else bias.float()

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """What it makes of rows, without scaling them."""
        if self.centers:
            rows = rows - rows.mean(dim=-1, keepdim=True)
        return rows * self.weight

    def before(self, directions: torch.Tensor) -> torch.Tensor:
        """What directions behind it are for the rows before it."""
        weighted = directions * self.weight
        if self.centers:
            weighted = weighted - weighted.mean(dim=-1, keepdim=True)
        return weighted

    def scale(self, rows: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """The scale `[n, 1]` at which it makes `normed` of `rows`; of zeros, 0."""
        own = self.own(rows)
        products = ((normed - self.bias) * own).sum(dim=-1, keepdim=True)
        squares = (own * own).sum(dim=-1, keepdim=True)
        return products / squares.masked_fill(squares == 0, 1)

    def error(self, rows: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """The relative difference of its form from what it has made."""
        exact = normed - self.bias
        found = self.own(rows) * self.scale(rows, normed)
        return (found - exact).norm() / exact.norm()

    def fitting(self, rows: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """The scale `[n, 1]`; NaN where it has not made `normed` of a row."""
        scale, exact = self.scale(rows, normed), normed - self.bias
        wrong = (self.own(rows) * scale - exact).norm(dim=-1, keepdim=True)
        known = wrong <= TOLERANCE * exact.norm(dim=-1, keepdim=True)
        return scale.masked_fill(~known, float("nan"))


@dataclass(slots=True)
class Projected:
    """The heads of one layer, and what is between them and the stream."""

    projection: Any
    """Upstream's linear module behind the heads."""
    norms: list[nn.Module]
    """Those of the layer, of which one may follow the projection."""
    heads: int
    width: int
    """Numbers of all heads together."""
    form: Form | None = field(default=None)
    """Known after the first rows."""

    def projected(self, z: torch.Tensor) -> torch.Tensor:
        """What the projection makes of `z` `[n, width]`, float32, without its bias."""
        found: torch.Tensor = self.projection.quant_method.apply(self.projection, z)
        return found.float()

    def output(self, z: torch.Tensor) -> torch.Tensor:
        """What attention returns for `z`, float32."""
        bias = getattr(self.projection, "bias", None)
        found = self.projected(z)
        return found if bias is None else found + bias.float()


class HeadParts:
    """The linear forms of a worker's attention layers. Engine thread only."""

    def __init__(self, layers: Mapping[int, Projected]) -> None:
        """Note the layers; without any there are no parts of heads."""
        self._layers = layers

    @property
    def layers(self) -> tuple[int, ...]:
        """Those whose heads are known."""
        return tuple(sorted(self._layers))

    def width(self, layer: int) -> int:
        """Numbers of all heads of a layer together."""
        return self._layers[layer].width

    def parts(
        self,
        layer: int,
        chosen: tuple[int, ...],
        z: torch.Tensor,  # [n, width]
        added: torch.Tensor,  # [n, H]
        directions: torch.Tensor,  # [t, H] float32
        kept: dict[Any, torch.Tensor],
    ) -> torch.Tensor:
        """What heads add along some directions.

        Args:
            layer: its index.
            chosen: the heads.
            z: of all heads, as the projection reads it.
            added: what attention has added to the stream (`attn_add`).
            directions: the directions.
            kept: what is kept for later rows with the same directions.

        Returns:
            `[n, heads, t]` float32; NaN of rows of which something else was added.

        Raises:
            ValueError: what is added is no linear function of the heads.

        """
        own = self._layers[layer]
        output, added = own.output(z), added.float()
        if own.form is None:
            own.form = _form(layer, own.norms, output, added)
        if layer not in kept:
            kept[layer] = self._before_projection(own, z, own.form.before(directions))
        size = z.shape[1] // own.heads
        heads = z.float().unflatten(-1, (own.heads, size))[:, list(chosen)]
        along = kept[layer].unflatten(-1, (own.heads, size))[:, list(chosen)]
        found = torch.einsum("nhv,thv->nht", heads, along)
        return found * own.form.fitting(output, added)[:, :, None]

    def _before_projection(
        self, own: Projected, z: torch.Tensor, directions: torch.Tensor
    ) -> torch.Tensor:
        """Directions behind a projection as those before it, `[t, width]`.

        Unit vectors go through it: its weights may be packed or quantised.
        """
        width = z.shape[1]
        parts = []
        for start in range(0, width, UNITS):
            count = min(UNITS, width - start)
            units = torch.zeros(count, width, dtype=z.dtype, device=z.device)
            units[:, start:].fill_diagonal_(1)
            parts.append(directions @ own.projected(units).T)
        return torch.cat(parts, dim=1)


def _form(
    layer: int, norms: list[Any], output: torch.Tensor, added: torch.Tensor
) -> Form:
    """What makes `added` of what attention returns: the likeliest of the layer's norms.

    Where two fit equally well, as of norms with equal weights, either is right.
    """
    candidates = [Form(), *(form for norm in norms for form in forms_of(norm))]
    form, error = likeliest(candidates, output, added)
    if error > TOLERANCE:
        raise ValueError(
            f"what attention of layer {layer} adds is not its output projection and "
            "one norm or multiplier of that: something else lies between, such as a "
            "gate, or this request changes z or attn_out there; read z"
        )
    return form


def likeliest(
    forms: Sequence[Form], rows: torch.Tensor, normed: torch.Tensor
) -> tuple[Form, float]:
    """The form with the smallest error, and the error; NaN counts as a large one."""
    errors = torch.stack([one.error(rows, normed) for one in forms]).nan_to_num(9.0)
    least = int(errors.argmin())
    return forms[least], float(errors[least])


def forms_of(norm: Any) -> list[Form]:
    """The forms that a norm of rows `[n, H]` may have."""
    return [Form(norm, added, centers) for added in (0, 1) for centers in (False, True)]


def norms_of(layer: nn.Module, width: int) -> list[nn.Module]:
    """The modules of a layer that have one weight for each number of the stream."""
    return [
        one
        for one in layer.modules()
        if getattr(getattr(one, "weight", None), "shape", None) == (width,)
    ]
