# SPDX-License-Identifier: Apache-2.0
"""An entry of a request's `readouts`, with typed access to its keys.

All parsers of kinds use it, so that errors of one key read alike.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from vllm.v1.readouts.errors import ReadoutValidationError, fail
from vllm.v1.residual.heads import parse_heads
from vllm.v1.residual.layer_selectors import parse_layers
from vllm.v1.residual.module_info import ModuleInfo
from vllm.v1.residual.numbers import Fail, is_integer
from vllm.v1.residual.readout_plan import Readout, Refusals, RowPart
from vllm.v1.residual.row_selection import (
    CaptureContext,
    parse_after,
    parse_hooks,
    parse_taps,
)
from vllm.v1.residual.selectors import resolve_positions
from vllm.v1.residual.spans import Spans
from vllm.v1.residual.tap import AFTER, PointShape, Tap, parse_address, shape_of

MAX_TOKENS = 1024
"""Token ids, features and positions of keys that a readout lists."""


ParseArray: TypeAlias = Callable[[Any, str], npt.NDArray[np.float32]]
"""`parse_array(raw, parameter)`; raises a `ValueError`."""


NOTHING_REFUSED = Refusals()


@dataclass(frozen=True, slots=True)
class Server:
    """What readouts may refer to on this server, and limits."""

    modules: Mapping[str, ModuleInfo]
    vocab_size: int
    max_top_k: int
    parse_array: ParseArray
    """Reads numbers from lists, arrays, tensors and packed data."""
    refusals: Refusals = NOTHING_REFUSED
    """What the loaded model does not support."""
    optional_points: Collection[str] = ()
    """The hook points that were asked for at the start."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One raw entry of `readouts`, with typed access to its keys."""

    name: str
    raw: Mapping[str, Any]
    ctx: CaptureContext
    server: Server

    def where(self, key: str) -> str:
        """The parameter's name in error messages."""
        return f"readouts.{self.name}.{key}"

    def fail(self, key: str, message: str) -> ReadoutValidationError:
        """The error for one key, to be raised by the caller."""
        where = self.where(key)
        return fail(f"{where}: {message}", where, self.raw.get(key))

    def _failing(self, key: str, value: Any) -> Fail:
        """Makes the errors of a parser, which are all for the whole key."""
        return lambda message, _parameter, _value: fail(message, self.where(key), value)

    def integer(self, key: str, default: int, least: int, most: int) -> int:
        """An integer within `[least, most]`."""
        value = self.raw.get(key, default)
        if not is_integer(value, least, most + 1):
            raise self.fail(key, f"must be an integer, {least} to {most}")
        return int(value)

    def integers(self, key: str, stop: int, what: str) -> tuple[int, ...]:
        """A list of integers within `[0, stop)`; empty if the key is absent."""
        given = self.raw.get(key)
        if given is None:
            return ()
        if not isinstance(given, list) or not 0 < len(given) <= MAX_TOKENS:
            raise self.fail(key, f"must be a list of 1 to {MAX_TOKENS} {what}")
        for value in given:
            if not is_integer(value, 0, stop):
                raise self.fail(key, f"{what} must be 0 to {stop - 1}, not {value!r}")
        return tuple(map(int, given))

    def taps(self, layers: Any, hook: Any) -> tuple[Tap, ...]:
        """The taps of a layer selector at one hook point, or the tap of an address."""
        if not isinstance(hook, str):
            raise self.fail("hook", "must be the name of a hook point")
        if parse_address(hook) is not None:
            if given := self.raw.keys() & {"layer", "layers"}:
                remedy = f"leave it out: the address {hook!r} includes the layer"
                raise self.fail(min(given), remedy)
            return self._hooks([hook], "hook")
        having = self._hooks({hook: "all"}, "hook")
        key = "layers" if "layers" in self.raw else "layer"
        found = parse_layers(
            layers,
            [layer for layer, _ in having],
            self.ctx.num_hidden_layers,
            self.where(key),
            fail,
        )
        return tuple((layer, having[0][1]) for layer in found)

    def hooks(self) -> tuple[Tap, ...]:
        """The taps of the key `hooks`."""
        return self._hooks(self.raw.get("hooks"), "hooks")

    def _hooks(self, hooks: Any, key: str) -> tuple[Tap, ...]:
        failing = self._failing(key, hooks)
        return parse_taps(hooks, self.ctx, self.where(key), failing)

    def shape(self, tap: Tap) -> PointShape:
        """The shape of a tap's rows."""
        return shape_of(self.ctx.point_shapes, tap, self.ctx.hidden_size)

    def part(self, taps: Sequence[Tap]) -> RowPart | None:
        """What is read of each row of taps, which must be equally wide.

        None for a whole row as wide as the stream.
        """
        ctx, key = self.ctx, "hooks" if "hooks" in self.raw else "hook"
        shapes = {tap: self.shape(tap) for tap in taps}
        heads: tuple[int, ...] = ()
        if self.raw.get("heads") is not None:
            for tap, shape in shapes.items():
                given, at = self.raw["heads"], self.where("heads")
                heads = parse_heads(given, tap, shape, at, fail)
        kinds = {
            (one.width, one.head_size if heads else 0): tap
            for tap, one in shapes.items()
        }
        if len(kinds) > 1:
            said = (f"{hook} of {n} has {one[0]}" for one, (n, hook) in kinds.items())
            raise self.fail(
                key,
                f"its rows must be equally wide; {', '.join(said)} numbers. Give a "
                "readout for each",
            )
        ((width, size),) = kinds
        if not heads and width == ctx.hidden_size:
            return None
        return RowPart(-(-width // ctx.hidden_size), width, heads, size)

    def inner(self, hook: str) -> tuple[Tap, ...]:
        """The taps of the key `layers` at a hook point of any width."""
        layers = self.raw.get("layers", "all")
        failing = self._failing("layers", layers)
        found = parse_hooks({hook: layers}, self.ctx, self.where("layers"), failing)
        return tuple((layer, hook) for layer in found[hook])

    def ranges(self) -> Spans:
        """The selected token positions; by default all generated tokens."""
        raw = self.raw.get("positions", "all_generated")
        if raw == "last_generated":
            raise self.fail(
                "positions",
                'readouts come with each token; "all_generated" with "reduce": "last" '
                "is the last one",
            )
        failing = self._failing("positions", raw)
        return resolve_positions(raw, self.ctx, self.where("positions"), failing)

    def after(self, readout: Readout) -> int:
        """The key `after`, as the readout's field."""
        reads = parse_after(
            self.raw[AFTER],
            readout.staged,
            self.ctx,
            AFTER in self.server.optional_points,
            lambda message, key, _: self.fail(key, message),
        )
        return self.ctx.num_hidden_layers - 1 if reads else -2

    def module(self, key: str, kind: str, option: str) -> ModuleInfo:
        """The registered module that a key names, which must be of `kind`."""
        name = self.raw.get(key)
        found = self.server.modules.get(name) if isinstance(name, str) else None
        if found is None or found.kind != kind:
            having = sorted(n for n, m in self.server.modules.items() if m.kind == kind)
            if not isinstance(name, str):
                raise self.fail(
                    key,
                    f"must be the name of a module of kind {kind}; this server has "
                    f"{having}, and {option} NAME=PATH adds one",
                )
            raise self.fail(
                key,
                f"this server has no {kind} {name!r}; it has {having}. Start it with "
                f"{option} {name}=PATH, or register one",
            )
        return found
