# SPDX-License-Identifier: Apache-2.0
"""The residual stream in the Transformers library, recorded and changed."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from tests.parity.inside import Inside
from tests.parity.recipe import ORDER, PLAIN, STREAMS, Point, Recipe, Spot
from tests.parity.substitutes import Substitute

Tap = tuple[int, str]
Stream = dict[Tap, torch.Tensor]
"""Rows `[positions, width]` by `(layer, hook)`, float32."""


def _entering(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    if args:
        return args[0]
    if "hidden_states" in kwargs:
        return kwargs["hidden_states"]
    return next(v for v in kwargs.values() if isinstance(v, torch.Tensor))


def _leaving(output: Any, result: int = 0) -> torch.Tensor:
    if isinstance(output, (tuple, list)):
        output = output[result]
    assert isinstance(output, torch.Tensor), type(output)
    return output


class Reference:
    """A checkpoint, loaded by the library, with hooks at its hook points."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype = torch.float32,
        recipe: Recipe = PLAIN,
        substitute: Substitute | None = None,
        loader: str = "AutoModelForCausalLM",
        watches_inside: bool = False,
    ) -> None:
        options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "eager"}
        made = getattr(transformers, loader).from_pretrained(folder, **options)
        self.model = made.eval()
        if substitute is not None:
            substitute.apply(self.model)
        self._given = recipe.given
        self.sums = recipe.sums
        runs = recipe.runs(self.model)
        self.points: dict[Tap, Point] = {
            (index, hook): point.of_run(run)
            for index, (layer, run) in enumerate(runs)
            for hook, point in recipe.points(layer).items()
        }
        several = any(hook in STREAMS for _, hook in self.points)
        self.order = STREAMS if several else ORDER
        """The points of the stream, or of the streams."""
        self._last_run = max(run for _, run in runs)
        self.inside: Inside | None = None
        """What the blocks compute inside, if it is watched and each runs once in a
        pass."""
        if watches_inside and not self._last_run:
            layers = [layer for layer, _ in runs]
            self.inside = Inside(self.model, layers, recipe.attention)
        self._seen: dict[Spot, torch.Tensor] = {}
        self._met: Counter[Spot] = Counter()
        self._runs = False
        self._changed = 0
        self._added: tuple[Tap, torch.Tensor] | None = None
        spots = [s for p in self.points.values() for s in (p.read, p.also) if s]
        for spot in dict.fromkeys(spots):
            self._watch(spot)

    def _watch(self, spot: Spot) -> None:
        def put(hidden: torch.Tensor) -> None:
            if not self._runs:
                return
            run = self._met[spot]
            assert run <= self._last_run, f"{spot} was met once too often"
            self._met[spot] += 1
            if run == spot.run:
                self._seen[spot] = spot.rows(hidden).clone()

        def entering(module: nn.Module, args: Any, kwargs: Any) -> None:
            put(_entering(args, kwargs))

        def leaving(module: nn.Module, args: Any, output: Any) -> None:
            put(_leaving(output, spot.result))

        if spot.side == "in":
            spot.module.register_forward_pre_hook(entering, with_kwargs=True)
        else:
            spot.module.register_forward_hook(leaving)

    def _value(self, tap: Tap) -> torch.Tensor:
        point = self.points[tap]
        rows = self._seen[point.read]
        if point.also is not None:
            rows = rows + self._seen[point.also]
        if point.plus is not None:
            return self._onward((tap[0], point.plus)) + rows * point.read.scale
        if point.minus is not None:
            return rows - self._onward((tap[0], point.minus))
        return rows

    def _onward(self, tap: Tap) -> torch.Tensor:
        """The value with which the model continues: the original plus the addition."""
        rows, point = self._value(tap), self.points[tap]
        # A value that is read after the change includes it; a value other than the
        # stream is changed for the MLP only.
        before = point.read == point.change and tap[1] in self.order
        if before and self._added is not None and self._added[0] == tap:
            return rows + self._added[1]
        return rows

    def run(
        self, token_ids: Sequence[int], num_prompt_tokens: int = 0
    ) -> tuple[Stream, torch.Tensor]:
        """The rows of every hook point for these tokens; logits `[tokens, words]`."""
        self._seen, self._met, self._changed = {}, Counter(), 0
        if self.inside is not None:
            self.inside.begin()
        ids = torch.tensor([list(token_ids)])
        given = self._given(ids, num_prompt_tokens)
        self._runs = True
        with torch.no_grad():
            output = self.model(use_cache=False, **given)
        self._runs = False
        missed = [tap for tap, p in self.points.items() if p.read not in self._seen]
        assert not missed, f"the library's model never passes {missed}"
        rows = {tap: self._value(tap) for tap in self.points}
        if self.inside is not None:
            rows |= self.inside.end()
        return rows, output.logits[0].float()

    def stream(self, token_ids: Sequence[int]) -> Stream:
        """The rows of the stream's hook points for these tokens."""
        rows, _ = self.run(token_ids, len(token_ids))
        return {tap: rows[tap] for tap in rows if tap[1] in self.order}

    @contextmanager
    def adding(self, tap: Tap, vector: torch.Tensor) -> Iterator[None]:
        """A context in which `vector` is added to the stream at a hook point."""
        spot = self.points[tap].change

        def more(hidden: torch.Tensor) -> torch.Tensor:
            self._changed += 1
            if self._changed != spot.run + 1:
                return hidden
            change = (vector.to(hidden.dtype) / spot.scale).to(hidden.dtype)
            return spot.plus(hidden, change)

        def entering(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if args:
                return (more(args[0]), *args[1:]), kwargs
            hidden = _entering(args, kwargs)
            return args, {k: more(v) if v is hidden else v for k, v in kwargs.items()}

        def leaving(module: nn.Module, args: Any, output: Any) -> Any:
            if not isinstance(output, (tuple, list)):
                return more(output)
            changed = list(output)
            changed[spot.result] = more(changed[spot.result])
            return type(output)(changed)

        # Registered after the recording hook: a value is recorded before it is changed.
        if spot.side == "in":
            hook = spot.module.register_forward_pre_hook(entering, with_kwargs=True)
        else:
            hook = spot.module.register_forward_hook(leaving)
        self._added = (tap, vector)
        try:
            yield
        finally:
            self._added = None
            hook.remove()

    def are_one(self, tap: Tap, other: Tap) -> bool:
        """Whether additions at two neighbouring points are equivalent."""
        # In parallel blocks nothing reads the stream between the branches.
        parallel = self.points[tap].plus is not None
        return parallel or other in self.shared_with(tap)

    def shared_with(self, tap: Tap) -> list[Tap]:
        """Later hook points that are equivalent, because nothing lies between."""
        layer, hook = tap
        order = self.order
        later = order[order.index(hook) + 1 :] if hook in order else ()
        spot = self.points[tap].change
        taps = [(layer, name) for name in later]
        return [other for other in taps if self.points[other].change == spot]


@contextmanager
def changing(
    module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """A context in which the rows that enter a module are changed."""

    def hook(module: Any, args: Any, kwargs: Any) -> Any:
        return (change(args[0]), *args[1:]), kwargs

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error of a row, relative to that row's norm in `expected`."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    if not found.numel():
        return 0.0
    return float(row_errors(found, expected).max())


def row_errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Each row's error, relative to its norm in `expected`."""
    return (found.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
