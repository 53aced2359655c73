# SPDX-License-Identifier: Apache-2.0
"""Named sets of vectors at other strengths: which a request names, and how strong."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from vllm.v1.residual.bounds import shown
from vllm.v1.steering.errors import fail
from vllm.v1.steering.operations import Operation, operation
from vllm.v1.steering.plan import PackedVectors, SteeringTiers, pack
from vllm.v1.steering.spec.entry import is_finite

MAX_NAMES = 16
"""That one request may give."""
BY_SCALE = ("add", "project_out", "low_rank")
"""Operations whose strength is their scale."""


class NamedScale(NamedTuple):
    """A module, and what its vectors are multiplied by."""

    name: Any
    scale: float
    parameter: str
    """That names it, for messages."""


def parse_names(name: Any, module_ref: Any) -> list[NamedScale]:
    """The modules that a request names.

    Args:
        name: of `steering_name`: a name, `{"name", "scale"?}`, or a list of these.
        module_ref: of `steering_module_ref`: `(name, scale)`.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    listed = [] if name is None else name if isinstance(name, (list, tuple)) else [name]
    if name is not None and not 0 < len(listed) <= MAX_NAMES:
        raise fail(
            f"steering_name lists 1 to {MAX_NAMES} modules", "steering_name", name
        )
    found = [_named(one) for one in listed]
    if module_ref is None:
        return found
    is_pair = isinstance(module_ref, (list, tuple)) and len(module_ref) == 2
    if not is_pair or not is_finite(module_ref[1]):
        raise fail(
            "steering_module_ref is [name, scale], with a finite number",
            "steering_module_ref",
            module_ref,
        )
    name, scale = module_ref
    return [*found, NamedScale(name, float(scale), "steering_module_ref")]


def _named(one: Any) -> NamedScale:
    if not isinstance(one, Mapping):
        return NamedScale(one, 1.0, "steering_name")
    unknown = sorted(str(key) for key in one if key not in ("name", "scale"))
    scale = one.get("scale", 1.0)
    if unknown or "name" not in one or not is_finite(scale):
        raise fail(
            'steering_name: a module is its name, or {"name": ..., "scale": s} with a '
            "finite number",
            "steering_name",
            dict(one),
        )
    return NamedScale(one["name"], float(scale), "steering_name")


def scaled(tiers: SteeringTiers, scale: float, parameter: str) -> SteeringTiers:
    """A named set with all of its vectors multiplied.

    What is added is multiplied, and the share that is projected out; of a clamp the
    strength is. Other operations have no strength that a number could multiply.

    Raises:
        SteeringValidationError: one of these is in the set.

    """
    if scale == 1.0:
        return tiers
    return SteeringTiers(*(_part(part, scale, parameter) for part in tiers.parts))


def _part(
    part: PackedVectors | None, scale: float, parameter: str
) -> PackedVectors | None:
    if part is None:
        return None
    operations = [_operation(one, scale, parameter) for one in part.operations]
    with np.errstate(over="ignore"):  # Admission refuses what overflows.
        vectors = {tap: v * np.float32(scale) for tap, v in part.unpack().items()}
    return pack(vectors, [one for one in operations if one.op != "add" or one.scale])


def _operation(one: Operation, scale: float, parameter: str) -> Operation:
    details, own = one.details, one.scale
    if one.op == "clamp":
        details = structs.replace(details, strength=details.strength * scale)
    elif one.op in BY_SCALE:
        own *= scale
    else:
        raise fail(
            f"{parameter}: the module has {one.op} at {one.hook} of layer {one.layer}, "
            f"which has no strength to multiply by {shown(scale)}; name it without a "
            "scale",
            parameter,
            scale,
        )
    return operation(
        one.tap,
        one.op,
        one.vector,
        own,
        (one.low, one.high),
        one.norm_match,
        one.positions,
        details,
        one.num_rows,
    )
