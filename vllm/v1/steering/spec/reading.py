# SPDX-License-Identifier: Apache-2.0
"""Facts about a file of vectors that are given beside it, or appended to its name."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Literal

from vllm.v1.residual.bounds import listed, shown
from vllm.v1.residual.numbers import layer_index
from vllm.v1.residual.tap import HOOK_NAMES, Tap, hook_name, resolve_tap
from vllm.v1.steering.errors import SteeringValidationError, fail

Numbers = Literal["block", "hidden_states"]
Layers = Literal["applied", "measured"]

NUMBERS: Mapping[str, str] = MappingProxyType(
    {
        "block": "k is block k, counted from 0, at the chosen hook point",
        "hidden_states": "k is the index into transformers' hidden_states: 0 is the "
        "embedding (pre_attn of block 0), k > 0 the output of block k - 1",
    }
)
GGUF_LAYERS: tuple[Layers, ...] = ("applied", "measured")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How to read a file; None is a fact that was not given.

    `layer`, `hook` and `key` select from a file that names its places, and never move a
    vector; for a vector whose file names no place, `layer` and `hook` are its place.
    """

    hook: str | None = None
    """A hook point, by our name."""
    layer: int | None = None
    """A 0-based layer."""
    key: str | None = None
    """The name of one tensor of a file that has several."""
    numbers: Numbers | None = None
    """The meaning of numbers as keys of a dictionary, see `NUMBERS`."""
    gguf_layers: Layers | None = None
    """Whether `direction.L` of a GGUF file is put where it is applied (the default) or
    where it was measured."""
    feature: int | None = None
    """Row of an SAE's decoder."""
    scale: float | None = None
    """Factor for the vectors."""

    @property
    def given(self) -> dict[str, Any]:
        """The facts that are given, by name."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def selects(self, tap: Tap) -> bool:
        """Whether a vector at a place that its file names is one of those asked for."""
        layer, hook = tap
        return self.layer in (None, layer) and self.hook in (None, hook_name(hook))

    def nothing_at(self, name: str, taps: list[Tap]) -> SteeringValidationError:
        """The error for a file that has no vector at the given layer and hook point."""
        fact = (
            "hook" if self.layer in (None, *(layer for layer, _ in taps)) else "layer"
        )
        wanted = " of ".join(
            [
                *([] if self.hook is None else [self.hook]),
                *([] if self.layer is None else [f"layer {self.layer}"]),
            ]
        )
        places = listed([f"{hook}.{layer}" for layer, hook in sorted(taps)])
        return fail(
            f"{fact}: {name!r} has no vector at {wanted}; it has {places}. layer and "
            "hook select from a file that names its places and move no vector: leave "
            "them out, or send the vector itself for another place",
            fact,
            getattr(self, fact),
        )

    @classmethod
    def parse(cls, text: str) -> "Reading":
        """Parse the facts after a file's name, such as `hook=post_block&layer=15`.

        Raises:
            SteeringValidationError: a fact is unknown, given twice, or its value is
                invalid.

        """
        values: dict[str, Any] = {}
        for part in text.split("&"):
            name, _, value = part.partition("=")
            try:
                found = None if name in values else _VALUES[name](value)
            except (KeyError, ValueError):
                found = None
            if found in (None, ""):
                raise fail(
                    f"path: {shown(part)} after the file's name must be one of "
                    f"{list(_VALUES)} with a valid value, each once, as in "
                    "FILE?hook=post_block&layer=15",
                    "path",
                    text,
                )
            values[name] = found
        return cls.resolved(**values)

    @classmethod
    def resolved(
        cls, *, hook: str | None = None, layer: int | None = None, **others: Any
    ) -> "Reading":
        """The facts with a hook point that may have another library's name.

        Raises:
            SteeringValidationError: the hook point is unknown, or an address of
                another layer.

        """
        if hook is None:
            return cls(layer=layer, **others)
        found = resolve_tap(layer, hook)
        if found is None:
            raise fail(
                f"hook: {shown(hook)} beside or after the file's name must be one of "
                f"{list(HOOK_NAMES)}, or an address such as post_block.3 without "
                "another layer",
                "hook",
                hook,
            )
        return cls(layer=found[0], hook=found[1], **others)


def _factor(text: str) -> float | None:
    factor = float(text)
    return factor if math.isfinite(factor) else None


_VALUES: dict[str, Any] = {
    "hook": str,
    "layer": layer_index,
    "numbers": {name: name for name in NUMBERS}.get,
    "gguf_layers": {name: name for name in GGUF_LAYERS}.get,
    "feature": layer_index,
    "key": str,
    "scale": _factor,
}
"""By a fact's name: the function that parses its value; None if it is invalid."""
