# SPDX-License-Identifier: Apache-2.0
"""Parses the hooks that users write to `HookSpec`s.

A hook is an object with `fn`, `layer_indices` and `pre`, or an equivalent mapping,
where `fn` is `{"name": n, "params": {...}}` or `{"cloudpickle": base64}`.
"""

import base64
import binascii
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.hooks.errors import fail
from vllm.v1.hooks.plan import GROUP, HookSpec
from vllm.v1.residual.numbers import is_integer
from vllm.v1.residual.plain_data import parse_text

MOST_HOOKS = 64
"""Most hooks of a request, and most registered ones."""

FORM = (
    'a hook is {"fn": {"name": n, "params": {...}} or {"cloudpickle": base64}, '
    '"layer_indices": [layers], "pre": false}'
)


@dataclass(frozen=True, slots=True)
class Allowed:
    """The limits for the hooks of a call."""

    points: Mapping[int, Sequence[str]]
    """Hook points of the model's layers."""
    code: bool
    """Whether pickled functions may be run."""


def hook_names() -> list[str]:
    """Names of the installed functions (entry points `vllm.hooks`), sorted."""
    return sorted(ep.name for ep in importlib.metadata.entry_points(group=GROUP))


def parse_hooks(raw: Any, allowed: Allowed, where: str) -> tuple[HookSpec, ...]:
    """Parse a list of hooks, or its JSON text.

    Args:
        raw: the value that the user wrote; a single hook may be given without a list.
        allowed: the limits for the hooks.
        where: the parameter's name in messages.

    Raises:
        HookError: a hook is invalid; the message names the parameter, the value and the
            remedy.

    """
    if isinstance(raw, str):
        try:
            raw = parse_text(raw)
        except ValueError as error:
            raise fail(
                f"{where} is text, so it must be JSON: {error}", where, raw
            ) from None
    hooks = raw if isinstance(raw, (list, tuple)) else [raw]
    if len(hooks) > MOST_HOOKS:
        raise fail(f"{where}: at most {MOST_HOOKS} hooks", where, len(hooks))
    return tuple(
        _hook(one, allowed, str(number), f"{where}[{number}]")
        for number, one in enumerate(hooks)
    )


def _hook(raw: Any, allowed: Allowed, key: str, where: str) -> HookSpec:
    if isinstance(raw, Mapping):
        fields = dict(raw)
    else:  # A `Hook`, ours or that of vllm-lens.
        names = ("fn", "layer_indices", "pre")
        fields = {name: getattr(raw, name) for name in names if hasattr(raw, name)}
    if unknown := sorted(fields.keys() - {"fn", "layer_indices", "pre"}):
        raise fail(f"{where}.{unknown[0]}: there is no such key; {FORM}", where, raw)
    if not {"fn", "layer_indices"} <= fields.keys():
        raise fail(f"{where}: {FORM}", where, raw)
    pre = fields.get("pre", False)
    if not isinstance(pre, bool):
        raise fail(f"{where}.pre must be true or false", f"{where}.pre", pre)
    point = "pre_attn" if pre else "post_block"
    layers = _layers(fields["layer_indices"], point, allowed, where)
    name, params, code = _function(fields["fn"], allowed, f"{where}.fn")
    return HookSpec(key, layers, point, name, params, code)


def _layers(raw: Any, point: str, allowed: Allowed, where: str) -> tuple[int, ...]:
    where = f"{where}.layer_indices"
    layers = list(raw) if isinstance(raw, (list, tuple, range)) else None
    if not layers or not all(map(is_integer, layers)):
        raise fail(f"{where} must be a list of layers, from 0", where, raw)
    for layer in layers:
        if point not in allowed.points.get(layer, ()):
            raise fail(
                f"{where}: this model has no {point} in layer {layer}; its layers are "
                f"{min(allowed.points)} to {max(allowed.points)}",
                where,
                layer,
            )
    return tuple(sorted({int(layer) for layer in layers}))


def _function(raw: Any, allowed: Allowed, where: str) -> tuple[str, str, bytes]:
    """The name, the parameters as JSON, and the code of a function."""
    # The caller of this process runs the engine, so its code is trusted.
    if callable(raw):
        import cloudpickle

        return "", "{}", cloudpickle.dumps(raw)
    fields = {"name": raw} if isinstance(raw, str) else raw
    if not isinstance(fields, Mapping):
        raise fail(f"{where}: {FORM}", where, raw)
    if fields.keys() == {"cloudpickle"}:
        return "", "{}", _code(fields["cloudpickle"], allowed, where)
    if "name" not in fields or fields.keys() - {"name", "params"}:
        raise fail(f"{where}: {FORM}", where, sorted(map(str, fields)))
    name, having = fields["name"], hook_names()
    if name not in having:
        raise fail(
            f"{where}.name: no hook {name!r} is installed; there are {having}. Install "
            f"a package with an entry point of this name in the group {GROUP}",
            f"{where}.name",
            name,
        )
    params = fields.get("params") or {}
    try:
        if not isinstance(params, Mapping):
            raise TypeError("it is no object")
        return str(name), json.dumps(dict(params), allow_nan=False), b""
    except (TypeError, ValueError) as error:
        raise fail(
            f"{where}.params must be a JSON object: {error}", f"{where}.params", params
        ) from None


def _code(raw: Any, allowed: Allowed, where: str) -> bytes:
    if not allowed.code:
        raise fail(
            f"{where}: this server runs no code of clients; name an installed "
            f'function, {{"name": one of {hook_names()}}}, use steering_vectors with '
            "an operation, or have the operator start it with "
            "--allow-remote-code-hooks",
            where,
            "(code)",
        )
    try:
        return base64.b64decode(raw, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise fail(f"{where}.cloudpickle must be base64", where, "(code)") from None
