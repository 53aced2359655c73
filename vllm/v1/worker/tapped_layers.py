# SPDX-License-Identifier: Apache-2.0
"""Which modules of a loaded model have hook points, and of which layer."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from vllm.model_executor.layers import residual_tap
from vllm.model_executor.models.utils import extract_layer_index

MLP_POINTS = ("mlp_in", "mlp_out")

Place = tuple[int, str]
"""`(layer, point)`."""


@dataclass(frozen=True, slots=True)
class TappedLayers:
    """The hook points of one process's part of the model."""

    modules: dict[Place, nn.Module]
    """The module to attach to, per place."""
    refusals: tuple[str, ...]
    """Why the model, as it is configured, must not be tapped."""

    @property
    def points(self) -> dict[int, list[str]]:
        """The hook points of each layer, in the order of the forward pass."""
        points: dict[int, list[str]] = {}
        for layer, point in sorted(self.modules, key=lambda place: place[0]):
            points.setdefault(layer, []).append(point)
        return points


def find_tapped_layers(model: nn.Module, mlp_points: bool) -> TappedLayers:
    """Look through the decoder of `model`; encoders beside it have no hook points.

    Where a tapped module contains another one, the outer module has the point:
    the inner one is a part of its block.
    """
    decoder = model
    if hasattr(model, "get_language_model"):
        decoder = model.get_language_model()  # type: ignore[operator]
    modules: dict[Place, nn.Module] = {}
    refusals: list[str] = []
    for name, module in decoder.named_modules():  # a parent comes before its parts
        points = residual_tap.hook_points(module)
        if not mlp_points:
            points = tuple(point for point in points if point not in MLP_POINTS)
        if not points:
            continue
        reasons = tuple(_reasons_against(module))
        if reasons:
            refusals += [reason for reason in reasons if reason not in refusals]
            continue
        layer = extract_layer_index(name)
        for point in points:
            modules.setdefault((layer, point), module)
    return TappedLayers(modules, tuple(refusals))


def _reasons_against(module: nn.Module) -> Iterator[str]:
    """Configurations in which a layer's points would not be what they say."""
    for reason in getattr(module, "hook_points_unless", ()):
        yield f"{type(module).__name__}: {reason}"
