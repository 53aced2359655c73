# SPDX-License-Identifier: Apache-2.0
"""Which rows of a request are wanted, and the facts with which that is checked."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NewType, TypeAlias

from vllm.v1.residual.bounds import shown
from vllm.v1.residual.layer_selectors import parse_layers
from vllm.v1.residual.numbers import Fail
from vllm.v1.residual.selectors import PositionName
from vllm.v1.residual.tap import (
    AFTER,
    HOOK_NAMES,
    HookName,
    Shapes,
    Tap,
    behind,
    did_you_mean,
    hook_name,
    parse_address,
    why_not,
)

VllmInternalRequestId = NewType("VllmInternalRequestId", str)
"""The unique, opaque id that the engine gives each sample; clients cannot choose it."""

PositionSelector: TypeAlias = PositionName | list[int] | dict[str, Any]
"""The positions to capture: a name, a list of token positions (negative ones count
from the prompt's end), `{"last": k}` or `{"ranges": [[first, last], ...]}`."""


@dataclass(frozen=True)
class CaptureSpec:
    """What to capture of a request: `hooks` maps each hook point to its layers."""

    hooks: dict[HookName, list[int]]
    positions: PositionSelector
    heads: tuple[int, ...] = ()
    """The heads whose part of each row is captured; empty for whole rows."""


@dataclass
class CaptureContext:
    """Facts about a request and the model, for `validate_client_spec`."""

    vllm_internal_request_id: VllmInternalRequestId
    num_prompt_tokens: int
    num_computed_tokens: int
    """Always 0: captured prompt tokens are recomputed even if they are cached."""
    num_hidden_layers: int
    """Number of decoder blocks in the whole model, over all pipeline stages."""
    hidden_size: int
    element_size_bytes: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    max_tokens: int | None = None
    """The maximum number of tokens to generate."""
    hook_points: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """The hook points that each layer of the loaded model has."""
    num_samples: int = 1
    """`n` of the request."""
    expert_parallel_size: int = 1
    data_parallel_size: int = 1
    point_shapes: Shapes = field(default_factory=dict)
    """Of hook points that have heads or another width than the stream."""
    missing: dict[str, str] = field(default_factory=dict)
    """Why no layer has an enabled hook point, by name."""


def parse_hooks(
    raw: Any, ctx: CaptureContext, where: str, fail: Fail
) -> dict[Any, list[int]]:
    """`{hook: layer selector}` with every selector as a sorted list of layers.

    A key may be another system's name of a hook point. Addresses, which name a layer
    too, stand in a list, or are keys whose value is None.
    """
    if isinstance(raw, list):
        raw = {name if isinstance(name, str) else shown(name): None for name in raw}
    if not isinstance(raw, dict) or not raw:
        raise fail(
            f"{where} must map at least one hook point to layers, for example "
            '{"post_block": [0]} or {"post_block": "all"}, or be a list of addresses '
            'such as ["post_block.0"]',
            where,
            raw,
        )
    hooks: dict[Any, list[int]] = {}
    for name, selector in raw.items():
        hook, selector = _hook(name, selector, where, fail)
        having = [
            layer for layer, points in sorted(ctx.hook_points.items()) if hook in points
        ]
        if not having:
            known = sorted({p for own in ctx.hook_points.values() for p in own})
            raise fail(
                f"{where}: this model has no hook point {hook!r}; it has "
                f"{known}{why_not(hook, ctx.missing)}",
                where,
                hook,
            )
        at = f"{where}.{name}"
        layers = parse_layers(selector, having, ctx.num_hidden_layers, at, fail)
        hooks[hook] = sorted({*hooks.get(hook, []), *layers})
    return hooks


def parse_taps(
    raw: Any, ctx: CaptureContext, where: str, fail: Fail
) -> tuple[Tap, ...]:
    """The taps of `parse_hooks`."""
    at = parse_hooks(raw, ctx, where, fail)
    return tuple((layer, str(hook)) for hook, layers in at.items() for layer in layers)


def parse_after(
    raw: Any, taps: Iterable[Tap], ctx: CaptureContext, enabled: bool, fail: Fail
) -> bool:
    """Parse the key `after`: whether rows are those behind what is done at `taps`.

    Args:
        raw: what the user wrote.
        taps: the places that are read.
        ctx: facts about the model.
        enabled: whether the server was started with `--hook-points after`.
        fail: creates the exception to raise.

    """
    if not isinstance(raw, bool):
        raise fail("must be true or false", AFTER, raw)
    last = ctx.num_hidden_layers - 1
    for tap in taps if raw else ():
        layer, hook = behind(tap, last)
        here = hook.endswith(AFTER) and (enabled or tap == (last, "post_block"))
        if not here and hook not in ctx.hook_points.get(layer, ()):
            raise fail(
                f"behind {tap[1]} of layer {tap[0]} this server reads nothing: start "
                f"it with --hook-points {AFTER}, or read post_block",
                AFTER,
                raw,
            )
    return raw


def _hook(name: Any, selector: Any, where: str, fail: Fail) -> tuple[str, Any]:
    """Our name of a hook point, and its layers; an address says both."""
    if isinstance(name, str) and (hook := hook_name(name)) is not None:
        return hook, selector
    if isinstance(name, str) and (tap := parse_address(name)) is not None:
        if selector is not None:
            raise fail(
                f"{where}.{name}: an address includes its layer; map it to None, or "
                "give a list of addresses",
                f"{where}.{name}",
                selector,
            )
        return tap[1], [tap[0]]
    raise fail(
        f"{where}: {shown(name)} is not a hook point; the hook points are "
        f"{list(HOOK_NAMES)}, and addresses such as post_block.3{did_you_mean(name)}",
        where,
        name,
    )
