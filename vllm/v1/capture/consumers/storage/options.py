# SPDX-License-Identifier: Apache-2.0
"""Validation of the parameters of storage consumers."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.capture.errors import CaptureValidationError, fail
from vllm.v1.capture.types import CaptureSpec, contexts_of
from vllm.v1.residual.numbers import is_finite, is_integer
from vllm.v1.residual.plain_data import plain
from vllm.v1.residual.row_selection import parse_hooks

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def global_spec(
    hooks: Any, positions: Any, vllm_config: "VllmConfig | None", where: str
) -> CaptureSpec | None:
    """Parse `global_hooks` and `global_positions`.

    Only the front end uses the spec, where the model's hook points are known. In a
    worker the layer selectors are not resolved.

    Args:
        hooks: hook point -> layer selector, or the text `HOOK:LAYER` or `HOOK:all`;
            None if nothing is captured globally.
        positions: a position selector.
        vllm_config: the engine's configuration.
        where: the consumer's name in messages.

    Raises:
        CaptureValidationError: names the parameter, the value and the remedy.

    """
    if hooks is None:
        return None
    hooks = plain(hooks)
    if isinstance(hooks, str) and ":" in hooks:
        hook, _, layers = hooks.partition(":")
        hooks = {hook: [int(layers)] if layers.isdecimal() else layers}
    if not isinstance(hooks, dict):
        raise CaptureValidationError(
            f"{where}.global_hooks must map hook points to layers, for example "
            '{"post_block": [0]}',
            parameter=f"{where}.global_hooks",
            value=hooks,
        )
    if vllm_config and vllm_config.capture_config.hook_points:
        ctx = contexts_of(vllm_config)("start-up", 1)
        hooks = parse_hooks(hooks, ctx, f"{where}.global_hooks", fail)
    return CaptureSpec(hooks, positions)


class Options:
    """Validates the values of a configuration, which are in `values`.

    Every method raises a `CaptureValidationError` that names the parameter, the value
    and the remedy.
    """

    def __init__(self, where: str, raw: dict[str, Any], known: Sequence[str]) -> None:
        self._where = where
        self.values = dict(raw)
        for name, value in raw.items():
            if name not in known:
                raise self.wrong(
                    name,
                    value,
                    f"unknown parameter; the parameters are {sorted(known)}",
                )

    def wrong(self, name: str, value: Any, remedy: str) -> CaptureValidationError:
        """Create the error for a parameter."""
        where = f"{self._where}.{name}"
        return CaptureValidationError(
            f"{where}={value!r}: {remedy}", parameter=where, value=value
        )

    def root(self, name: str, example: str) -> None:
        """Check that a value names a directory; creates it and makes it absolute."""
        value = self.values.get(name)
        if not isinstance(value, (str, Path)) or not str(value):
            raise self.wrong(
                name, value, f"it must name the folder to write to, as in {example}"
            )
        path = Path(value).expanduser().absolute()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self.wrong(
                name, value, f"the folder cannot be created ({error}); use another one"
            ) from error
        self.values[name] = path

    def choice(self, name: str, allowed: Sequence[str]) -> None:
        """Check that a value, if given, is one of `allowed`."""
        value = self.values.get(name, allowed[0])
        if value not in allowed:
            raise self.wrong(name, value, f"it must be one of {list(allowed)}")

    def boolean(self, name: str) -> None:
        """Check that a value, if given, is a bool, or the text of a Python bool."""
        value = self.values.get(name, True)
        if value in ("True", "False"):
            self.values[name] = value = value == "True"
        if not isinstance(value, bool):
            raise self.wrong(name, value, "it must be true or false")

    def whole(self, name: str, most: int = 1 << 62, optional: bool = False) -> None:
        """Check that a value is an integer from 1 to `most`, or None if `optional`."""
        value: Any = self.values.get(name, None if optional else 1)
        if optional and value is None:
            return
        if not is_integer(value, 1):
            raise self.wrong(name, value, "it must be an integer above 0")
        if value > most:
            raise self.wrong(name, value, f"it must be at most {most}")

    def seconds(self, name: str) -> None:
        """Check that a value is a positive, finite number."""
        value = self.values.get(name, 1.0)
        if not is_finite(value) or value <= 0:
            raise self.wrong(name, value, "it must be a number of seconds above 0")
