# SPDX-License-Identifier: Apache-2.0
"""Arguments and results of calls: addresses, directions, lenses, steps, descriptions.

Objects of interp-engine's own classes are accepted wherever these are.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from vllm.v1.residual.bounds import shown
from vllm.v1.residual.tap import Tap, parse_address

NAMES = {
    "pre_attn": "resid_pre",
    "post_attn": "resid_mid",
    "post_block": "resid_post",
}
"""Our hook points whose canonical name in interp-engine differs."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address of rows: a point's canonical name, and the layer."""

    name: str
    layer: int | None = None
    stream: int | None = None

    def __str__(self) -> str:
        parts = [self.name] if self.layer is None else [self.name, str(self.layer)]
        return ".".join(
            parts if self.stream is None else [*parts, f"stream-{self.stream}"]
        )


@dataclass(frozen=True, slots=True)
class DirectionSet:
    """Directions whose products with rows are read at one point."""

    point: Any
    vectors: torch.Tensor
    """`[k, width]`"""
    bias: torch.Tensor | None = None
    """`[k]`, added to the products."""
    nonlinearity: str = "none"
    """`none` or `relu`."""


@dataclass(frozen=True, slots=True)
class LensSpec:
    """One lens that is read at every position."""

    layers: list[int]
    jacobian: bool = False
    """Whether a layer's rows pass the layer's map first, if it has one."""
    jacobian_set: str = "default"


@dataclass(frozen=True, slots=True)
class LensStep:
    """The lenses' results at one position."""

    position: int
    token_id: int
    is_generated: bool
    top_ids: list[torch.Tensor]
    """Token ids of each lens, `[layers, k]`, best first."""
    top_probs: list[torch.Tensor]
    """Probabilities of each lens, `[layers, k]` float32, over the whole vocabulary."""


@dataclass(frozen=True, slots=True)
class GenStep:
    """One generated token."""

    token_id: int
    token_str: str
    logits: None = None
    logprobs: list[dict[str, float | int]] | None = None


@dataclass(frozen=True, slots=True)
class RecommendedSampling:
    """What a checkpoint's `generation_config.json` states; None if it does not.

    A value that switches a setting off counts as not stated.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    do_sample: bool | None = None
    """False recommends a temperature of 0."""
    source: str | None = None
    """The model or the folder whose file states something."""


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """The sampling settings of a generation."""

    temperature: float
    top_k: int | None
    top_p: float | None
    presence_penalty: float

    def as_dict(self) -> dict[str, float | int | None]:
        """The settings as JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    """What a model can serve."""

    backend: str
    hf_model_id: str
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hooks_available: bool
    graph_replay: bool
    static_points: list[Any]
    static_writes: list[Any]
    capture_points: list[str]
    residual_readable: bool
    attention: bool


def tap_of(point: Any, layer: int | None = None) -> Tap:
    """The `(layer, hook)` of an address, of its text, or of a point and a layer.

    Raises:
        ValueError: the hook point does not exist here.

    """
    if isinstance(point, tuple) and len(point) == 2:
        point, layer = point
    text = str(point) if layer is None else f"{point}.{layer}"
    tap = parse_address(text)
    if tap is None:
        raise ValueError(
            f"{shown(text)} is not served here: use resid_pre.L, resid_mid.L, "
            "resid_post.L or, with --hook-points mlp_in mlp_out, mlp_in.L, mlp_out.L, "
            "for a layer L"
        )
    return tap


def address_of(point: Any, tap: Tap) -> Any:
    """The key of a result: the caller's own address, or one for its text."""
    if not isinstance(point, (str, tuple)):
        return point
    return Address(NAMES.get(tap[1], tap[1]), tap[0])
