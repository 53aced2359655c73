# SPDX-License-Identifier: Apache-2.0
"""The named vectors of gates: steering modules that are named `KIND:NAME`.

A kind is `probe` or `steer`; the two have names of their own.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.interop.reference_fork.gates import Layers, unpacked_hooks
from vllm.v1.residual.bounds import listed, shown
from vllm.v1.residual.plain_data import MAX_NAME
from vllm.v1.steering.errors import UnknownModuleError, fail
from vllm.v1.steering.frontend.modules import SteeringModules, check_name
from vllm.v1.steering.spec.parse import Parsed, parse_vectors

if TYPE_CHECKING:
    from vllm.v1.steering.frontend.async_frontend import AsyncSteeringControl
    from vllm.v1.steering.frontend.frontend import SteeringFrontend

KINDS = ("probe", "steer")
MAX_NAMES = 1024
"""Registered vectors of each kind."""

Names = dict[str, list[str]]


async def names(control: "AsyncSteeringControl") -> Names:
    """The names of an engine's vectors, by kind."""
    return _by_kind(await control.module_names())


async def register(
    control: "AsyncSteeringControl", name: Any, kind: Any, packed: Any
) -> Names:
    """Add or replace the vectors of a name; returns all names.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    known = await names(control)
    _check_kind(kind)
    check_name(name, MAX_NAME - len("probe:"))
    parsed = _parsed(kind, packed, control.frontend.enabled())
    if len(known[kind]) >= MAX_NAMES and name not in known[kind]:
        raise fail(
            f"name: there are {MAX_NAMES} vectors of this kind; unregister one",
            "name",
            name,
        )
    await control.register(f"{kind}:{name}", {"vectors": parsed}, True, None)
    return await names(control)


async def unregister(control: "AsyncSteeringControl", name: Any, kind: Any) -> Names:
    """Remove the vectors of a name; returns the other names.

    Raises:
        UnknownModuleError: there are none.
        SteeringValidationError: `kind` is none, or `name` is not text.

    """
    known = await names(control)
    _check_kind(kind)
    if not isinstance(name, str):
        raise fail("name must be the name of registered vectors", "name", name)
    if name not in known[kind]:
        raise UnknownModuleError(
            f"name: no {kind} vector is named {shown(name)}; there are "
            f"{listed(known[kind])}",
            parameter="name",
            value=shown(name),
        )
    await control.unregister(f"{kind}:{name}")
    return await names(control)


def vectors_of(modules: SteeringModules, kind: str, name: Any, where: str) -> Layers:
    """The vectors of a name, as a gate gives it, by hook point and layer.

    Raises:
        SteeringValidationError: there are none of this kind.

    """
    key = f"{kind}:{name}"
    known = modules.all
    if not isinstance(name, str) or key not in known:
        raise fail(
            f"{where}: no {kind} vector is named {shown(name)}; there are "
            f"{listed(_by_kind(known)[kind])}. Add one by POST "
            "/v1/steering/vectors/register",
            where,
            name,
        )
    base = known[key].tiers.base
    found: dict[str, dict[int, Any]] = {}
    for (layer, hook), vector in base.unpack().items() if base is not None else ():
        found.setdefault(hook, {})[layer] = vector
    return found


def _parsed(kind: str, packed: Any, frontend: "SteeringFrontend") -> Parsed:
    layers = unpacked_hooks(packed, "packed")
    parsed = parse_vectors(layers, frontend.admission.model, "packed")
    if parsed.operations or parsed.generated:
        raise fail(
            "packed: vectors of gates are added; give other operations as entries of "
            "decode_steering_vectors, which may have `when`",
            "packed",
            sorted(layers),
        )
    if kind == "probe" and len(parsed.vectors) != 1:
        raise fail(
            "packed: a probe has one vector at one layer and hook point",
            "packed",
            sorted(layers),
        )
    return parsed


def _by_kind(modules: Iterable[str]) -> Names:
    named = [name.partition(":") for name in modules]
    return {kind: [rest for own, _, rest in named if own == kind] for kind in KINDS}


def _check_kind(kind: Any) -> None:
    if kind not in KINDS:
        raise fail(f"kind must be one of {list(KINDS)}", "kind", kind)
