# SPDX-License-Identifier: Apache-2.0
"""Converts interp-engine's steering operations to entries of `steering_vectors`.

In interp-engine, operations at one site apply in the order in which they are written.
Here, a hook point applies kinds of operations in a fixed order. Other orders are
refused.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from vllm.interop.interp_engine.types import tap_of
from vllm.interop.interp_engine.wire import decode_tensor
from vllm.v1.residual.bounds import shown
from vllm.v1.residual.numbers import is_finite
from vllm.v1.residual.tap import Tap


class _Method(NamedTuple):
    """A method of interp-engine."""

    spec: str
    """The class of its operations, by name."""
    rank: int
    """When a hook point applies it; those of an equal rank in the order of writing."""
    fields: tuple[str, ...]


METHODS = {
    "additive": _Method("AddSpec", 0, ("vector", "scale", "normalize")),
    "norm_scaled_add": _Method(
        "NormScaledAddSpec", 0, ("vector", "strength", "max_fraction", "normalize")
    ),
    "orthogonal": _Method("OrthogonalDecompSpec", 1, ("vector", "coeff")),
    "ablate": _Method("AblateSpec", 1, ("vector",)),
    "swap": _Method("SwapSpec", 2, ("vector", "target")),
    "projection_cap": _Method("ProjectionCapSpec", 3, ("vector", "min", "max")),
}
"""The methods by name, in the order in which one hook point applies them."""

Vectors = dict[str, dict[int, list[dict[str, Any]]]]
"""Entries by hook point and layer, in the form of `SamplingParams.steering_vectors`."""


Tiers = dict[str, Vectors]
"""`Vectors` by field of `SamplingParams`; empty if nothing is steered."""


def steering_of(
    model: Any, spec: Any, prompt: Sequence[int], generated: bool = True
) -> Tiers:
    """What a call is steered with: its own spec, or the open block of its caller.

    Args:
        model: what `interp_engine.steer` was given.
        spec: the call's own steering, which precedes a block; None for no own one.
        prompt: the prompt's token ids.
        generated: whether the call's own steering acts at generated tokens, too.

    Raises:
        ValueError: an operation is unsupported; the message names the alternative.

    """
    width, kept = model.d_model, None
    if spec is None and (block := _open_block(model)) is not None:
        spec, generated = list(block.specs), block.generated
        kept = _kept_positions(block.position_mask, prompt, model.tokenizer)
    vectors = vectors_of(spec, width)
    if vectors is None:
        return {}
    if generated and kept is None:
        return {"steering_vectors": vectors}
    tiers = {"decode_steering_vectors": vectors} if generated else {}
    if kept is None:
        tiers["prefill_steering_vectors"] = vectors
    elif kept:
        tiers["prefill_steering_vectors"] = _at_positions(vectors, kept)
    return tiers


def readable_tap(tap: Tap, tiers: Tiers, num_layers: int) -> Tap:
    """The tap whose rows are those of `tap` after its own steering.

    A capture sees the stream before the steering at its point; in interp-engine, reads
    come after it.

    Raises:
        ValueError: there is no such tap.

    """
    layer, hook = tap
    if not any(layer in vectors.get(hook, ()) for vectors in tiers.values()):
        return tap
    if hook == "post_block" and layer + 1 < num_layers:
        # The input of the next layer is captured before its steering there.
        return layer + 1, "pre_attn"
    raise ValueError(
        f"{hook} of layer {layer} is read and steered at once, and no later point has "
        "the same stream: steer there, and read another point"
    )


def _open_block(model: Any) -> Any:
    """The `with steer(model, ...)` that encloses the call; None if there is none."""
    steer = sys.modules.get("interp_engine.steer")
    return None if steer is None else steer.active_steering(model)


def _kept_positions(
    mask: Any, prompt: Sequence[int], tokenizer: Any
) -> list[int] | None:
    """The prompt positions that a mask leaves; None if there is no mask."""
    if mask is None:
        return None
    from interp_engine.steer import resolve_masked_positions

    left_out = resolve_masked_positions(
        mask, prompt_token_ids=list(prompt), tokenizer=tokenizer
    )
    return [at for at in range(len(prompt)) if at not in set(left_out)]


def _at_positions(vectors: Vectors, positions: list[int]) -> Vectors:
    return {
        hook: {
            layer: [entry | {"positions": positions} for entry in entries]
            for layer, entries in layers.items()
        }
        for hook, layers in vectors.items()
    }


def vectors_of(steering: Any, width: int) -> Vectors | None:
    """Convert a spec, or a list of specs, to entries; None if there are none.

    Args:
        steering: `SteeringSpec`s of interp-engine, or their JSON form.
        width: the model's hidden size.

    Raises:
        ValueError: an operation is unsupported; the message names the alternative.

    """
    if steering is None:
        return None
    specs = steering if isinstance(steering, (list, tuple)) else [steering]
    methods: dict[Tap, list[str]] = {}
    vectors: Vectors = {}
    for spec in specs:
        for tap, method, fields in _operations(spec):
            methods.setdefault(tap, []).append(method)
            layer, hook = tap
            entry = _entry(method, fields, width)
            vectors.setdefault(hook, {}).setdefault(layer, []).append(entry)
    for tap, written in methods.items():
        _check_order(tap, written)
    return vectors or None


def _operations(spec: Any) -> Iterator[tuple[Tap, str, Mapping[str, Any]]]:
    """Yield the tap, method and fields of each operation of one spec."""
    if isinstance(spec, Mapping):
        if unknown := sorted(spec.keys() - {"point", "stream", "layers"}):
            raise ValueError(f"steering has no field {unknown[0]!r}")
        point, stream = spec.get("point", "resid_post"), spec.get("stream")
        layers = spec.get("layers")
        if not isinstance(layers, Mapping):
            raise ValueError("steering.layers must map layers to lists of operations")
    else:
        point, stream, layers = spec.point, spec.stream, spec.layers
    if stream is not None:
        raise ValueError(f"steering.stream={stream}: models here have one stream")
    for layer, operations in layers.items():
        if not isinstance(layer, int) and not str(layer).isdigit():
            raise ValueError(f"steering.layers: {shown(layer)} is not a 0-based layer")
        tap = tap_of(point, int(layer))
        for operation in getattr(operations, "operations", operations) or ():
            method, fields = _method(operation)
            yield tap, method, fields


def _method(operation: Any) -> tuple[str, Mapping[str, Any]]:
    if isinstance(operation, Mapping):
        method = operation.get("method")
        if not isinstance(method, str) or method not in METHODS:
            raise ValueError(
                f"steering: method {shown(method)} is unknown; use one of "
                f"{list(METHODS)}"
            )
        fields = METHODS[method].fields
        if unknown := sorted(operation.keys() - {"method", *fields}):
            raise ValueError(
                f"steering: {method} has no field {shown(unknown[0])}; its fields are "
                f"{list(fields)}"
            )
        return method, operation
    methods = {one.spec: name for name, one in METHODS.items()}
    spec = type(operation).__name__
    if spec not in methods:
        raise ValueError(f"steering: {spec} is no operation; use {list(methods)}")
    return methods[spec], vars(operation)


def _entry(method: str, fields: Mapping[str, Any], width: int) -> dict[str, Any]:
    vector = _vector(fields, "vector", method, width)
    match method:
        case "additive":
            if _normalizes(fields):
                vector = _unit(vector, method)
            return {"vector": vector, "scale": _number(fields, "scale", None)}
        case "norm_scaled_add":
            return _norm_scaled(fields, vector, method)
        case "orthogonal":
            scale = 1.0 - _number(fields, "coeff", 1.0)
            return {"op": "project_out", "vector": vector, "scale": scale}
        case "ablate":
            return {"op": "project_out", "vector": vector}
        case "swap":
            target = _vector(fields, "target", method, width)
            return {"op": "swap", "vector": vector, "target": target}
        case _:
            given = [k for k in ("min", "max") if fields.get(k) is not None]
            bounds = {k: _number(fields, k, None) for k in given}
            if not bounds:
                raise ValueError("steering: projection_cap needs min or max")
            return {"op": "clamp", "vector": vector, **bounds}


def _norm_scaled(
    fields: Mapping[str, Any], vector: torch.Tensor, method: str
) -> dict[str, Any]:
    """`strength * |h| * v`, with a norm of at most `max_fraction * |h|`."""
    length = 1.0 if _normalizes(fields) else float(vector.norm())
    strength = _number(fields, "strength", None) * length
    most = _number(fields, "max_fraction", 1.0)
    share = max(-most, min(most, strength))
    if not length:
        return {"vector": vector, "scale": 0.0}
    return {"vector": _unit(vector, method), "scale": share, "norm_match": True}


def _check_order(tap: Tap, written: Sequence[str]) -> None:
    ranks = [METHODS[method].rank for method in written]
    later = "norm_scaled_add" in written[1:] and ranks.count(0) > 1
    if ranks != sorted(ranks) or later:
        raise ValueError(
            f"steering: at {tap[1]} of layer {tap[0]} the operations are written as "
            f"{list(written)}; at one point they are applied in the order "
            f"{list(METHODS)}, and norm_scaled_add measures the stream before any "
            "addition. Use this order, or put them at different points"
        )


def _vector(
    fields: Mapping[str, Any], name: str, method: str, width: int
) -> torch.Tensor:
    given = fields.get(name)
    if given is None:
        raise ValueError(f"steering: {method} needs a {name}")
    vector = decode_tensor(given).flatten()
    if vector.numel() != width:
        raise ValueError(
            f"steering: {method} {name} has {vector.numel()} values; the model's "
            f"stream has {width}"
        )
    return vector


def _unit(vector: torch.Tensor, method: str) -> torch.Tensor:
    length = vector.norm()
    if not float(length):
        raise ValueError(f"steering: the vector of {method} has no direction")
    return vector / length


def _number(fields: Mapping[str, Any], name: str, default: float | None) -> float:
    value = fields.get(name, default)
    if not is_finite(value):
        raise ValueError(
            f"steering: {name} must be a finite number, not {shown(value)}"
        )
    return float(value)


def _normalizes(fields: Mapping[str, Any]) -> bool:
    value = fields.get("normalize") or False
    if not isinstance(value, bool):
        raise ValueError(
            f"steering: normalize must be true or false, not {shown(value)}"
        )
    return value
