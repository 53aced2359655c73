# SPDX-License-Identifier: Apache-2.0
"""Finds the modules of a loaded model that have hook points, and their layers."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from torch import nn
from transformers import PreTrainedModel

from vllm.model_executor.layers.residual import tap
from vllm.model_executor.layers.residual.runtime_weave import NotWoven, weave_layer
from vllm.model_executor.models.utils import PPMissingLayer, extract_layer_index
from vllm.model_executor.residual_weave.rules import NOT_TAPPED, REFUSED
from vllm.v1.residual.tap import OPTIONAL_POINTS
from vllm.v1.worker.inner_points import InnerPoint

Place = tuple[int, str]
"""`(layer, point)`."""
LEAVING = ("post_block", "streams_post")
"""The points at which a block is left."""


@dataclass(frozen=True, slots=True)
class TappedLayers:
    """The hook points of one process's part of the model.

    A layer's own come first, then those inside its block.
    """

    modules: dict[Place, tuple[nn.Module, int]]
    """By place: the module to attach to, and the index of its run in a pass."""
    refusals: tuple[str, ...]
    """Reasons why the model, as configured, must not be tapped."""
    inner: dict[Place, InnerPoint] = field(default_factory=dict)
    """By place: the points inside the blocks."""

    @property
    def blocks(self) -> dict[int, nn.Module]:
        """The decoder layers that run once in a pass, by index."""
        ends = {
            layer: module
            for (layer, point), (module, _) in self.modules.items()
            if point in LEAVING
        }
        modules = list(ends.values())
        return {n: module for n, module in ends.items() if modules.count(module) == 1}

    @property
    def streams(self) -> dict[int, int]:
        """The number of streams, of layers whose residual is several, by index."""
        return {
            layer: count
            for layer, module in self.blocks.items()
            if (count := tap.num_streams(module))
        }

    @property
    def points(self) -> dict[int, list[str]]:
        """The hook points of each layer, in the order of the forward pass."""
        points: dict[int, list[str]] = {}
        places = [*self.modules, *self.inner]
        for layer, point in sorted(places, key=lambda place: place[0]):
            points.setdefault(layer, []).append(point)
        return points


def find_tapped_layers(
    model: nn.Module, optional: Collection[str], num_layers: int, weaves: bool
) -> TappedLayers:
    """Find the hook points of the decoder of `model`; its encoders have none.

    If a tapped module contains another one, the outer module has the point, because
    the inner one is a part of its block.

    Args:
        model: the loaded model.
        optional: the enabled points beside those of the stream.
        num_layers: number of layers of the whole decoder; identifies its list of
            layers.
        weaves: whether to weave layers that were not woven at build time, because they
            are not part of the release.
    """
    decoder = _decoder_of(model)
    refusals = dict.fromkeys(_weave_the_rest(decoder, num_layers) if weaves else ())
    modules: dict[Place, tuple[nn.Module, int]] = {}
    for name, module in decoder.named_modules():  # Parents come before children.
        points = tuple(
            point
            for point in tap.hook_points(module)
            if point not in OPTIONAL_POINTS or point in optional
        )
        if not points:
            continue
        reasons = tuple(_reasons_against(module))
        if reasons:
            refusals |= dict.fromkeys(reasons)
            continue
        for run, numbered in _runs(module, name).items():
            layer = extract_layer_index(numbered)
            for point in points:
                modules.setdefault((layer, point), (module, run))
    return TappedLayers(modules, tuple(refusals))


def _decoder_of(model: nn.Module) -> nn.Module:
    """The decoder of a model that may have encoders as well."""
    if hasattr(model, "get_language_model"):
        model = model.get_language_model()  # type: ignore[operator]
    inner = getattr(model, "model", None)
    if isinstance(inner, PreTrainedModel):  # The Transformers modeling backend.
        return inner.get_decoder()
    return model


def _weave_the_rest(decoder: nn.Module, num_layers: int) -> Iterator[str]:
    """Weave the layers that have no hook points; yields the reasons of failures."""
    for stack in _stacks(decoder, num_layers):
        for layer in stack:
            if not isinstance(layer, PPMissingLayer) and not _is_tapped(layer):
                yield from _woven_now(layer)


def _stacks(decoder: nn.Module, num_layers: int) -> Iterator[nn.ModuleList]:
    """Yield the lists of layers; lists inside of a layer are skipped."""
    within: set[nn.Module] = set()
    for module in decoder.modules():  # Parents come before children.
        if not isinstance(module, nn.ModuleList) or len(module) != num_layers:
            continue
        if module not in within:
            within.update(module.modules())
            yield module


def _is_tapped(layer: nn.Module) -> bool:
    return any(tap.hook_points(part) for part in layer.modules())


def _woven_now(layer: nn.Module) -> Iterator[str]:
    cls = type(layer)
    if cls.__module__.startswith("vllm."):
        yield f"{cls.__name__}: {_reason_of_the_release(cls)}"
        return
    try:
        weave_layer(layer)
    except NotWoven as error:
        yield f"{cls.__module__}.{cls.__qualname__}: {error}"


def _reason_of_the_release(cls: type[nn.Module]) -> str:
    """Why a layer of the release was not woven at build time."""
    where = cls.__module__.removeprefix("vllm.").replace(".", "/")
    key = f"{where}:{cls.__name__}"
    return (
        REFUSED.get(key) or NOT_TAPPED.get(key) or "the layer is not part of the build"
    )


def _runs(module: nn.Module, name: str) -> dict[int, str]:
    """The runs of a module in a forward pass, each with a name containing the layer.

    A module that runs several times counts as a separate layer each time, as it does
    for the KV cache.
    """
    return getattr(module, "hook_points_runs", {0: name})


def _reasons_against(module: nn.Module) -> Iterator[str]:
    """Yield reasons why a module's hook points would be wrong as configured."""
    for reason in getattr(module, "hook_points_unless", ()):
        points = ", ".join(tap.hook_points(module))
        yield f"{type(module).__name__}: {reason} (otherwise it has {points})"
