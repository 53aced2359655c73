# SPDX-License-Identifier: Apache-2.0
"""Named modules with scales: which modules a request names, and how strongly."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from vllm.v1.residual.bounds import shown
from vllm.v1.residual.numbers import is_finite
from vllm.v1.steering.errors import fail
from vllm.v1.steering.plan import (
    Operation,
    PackedVectors,
    SteeringTiers,
    hashed,
    pack,
)
from vllm.v1.steering.spec.table import finite

MAX_NAMES = 16
"""Most modules that one request may name."""
BY_SCALE = ("add", "project_out", "low_rank")
"""Operations that a scale multiplies."""


class NamedScale(NamedTuple):
    """A module's name, and the factor of its vectors."""

    name: Any
    scale: float
    parameter: str
    """The request field that names it, for messages."""


def parse_names(name: Any, module_ref: Any) -> list[NamedScale]:
    """Parse the modules that a request names.

    Args:
        name: the value of `steering_name`: a name, `{"name", "scale"?}`, or a list of
            these.
        module_ref: the value of `steering_module_ref`: `(name, scale)`.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    listed = [] if name is None else name if isinstance(name, (list, tuple)) else [name]
    if name is not None and not 0 < len(listed) <= MAX_NAMES:
        raise fail(
            f"steering_name must list 1 to {MAX_NAMES} modules", "steering_name", name
        )
    found = [_named(one) for one in listed]
    if module_ref is None:
        return found
    is_pair = isinstance(module_ref, (list, tuple)) and len(module_ref) == 2
    if not is_pair or not is_finite(module_ref[1]):
        raise fail(
            "steering_module_ref must be [name, scale], with a finite number",
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
            'steering_name: a module is a name, or {"name": ..., "scale": s} with a '
            "finite number",
            "steering_name",
            dict(one),
        )
    return NamedScale(one["name"], float(scale), "steering_name")


def scaled(tiers: SteeringTiers, scale: float, parameter: str) -> SteeringTiers:
    """A module with all of its vectors multiplied.

    The scale multiplies what is added, the share that is projected out, and a clamp's
    strength. Other operations have no factor.

    Raises:
        SteeringValidationError: the module contains an operation without a factor.

    """
    if scale == 1.0:
        return tiers
    return tiers.changed(partial(_part, scale=scale, parameter=parameter))


def _part(part: PackedVectors, scale: float, parameter: str) -> PackedVectors | None:
    operations = [_operation(one, scale, parameter) for one in part.operations]
    with np.errstate(over="ignore"):  # Admission refuses values that overflow.
        vectors = {tap: v * np.float32(scale) for tap, v in part.unpack().items()}
    return pack(vectors, [one for one in operations if one.op != "add" or one.scale])


def _operation(one: Operation, scale: float, parameter: str) -> Operation:
    details, own = one.details, one.scale
    if one.op == "clamp":
        strength = finite(details.strength * scale, parameter)
        details = structs.replace(details, strength=strength)
    elif one.op in BY_SCALE:
        own = finite(own * scale, parameter)
    else:
        raise fail(
            f"{parameter}: the module has {one.op} at {one.hook} of layer {one.layer}, "
            f"which has no strength to multiply by {shown(scale)}; name it without a "
            "scale",
            parameter,
            scale,
        )
    return hashed(structs.replace(one, scale=own, details=details))
