# SPDX-License-Identifier: Apache-2.0
"""The cells of a sweep: hook points, layers, heads and columns of positions.

Columns are found from indices and from spans of text.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm.patching.alignment import Alignment
from vllm.v1.residual.bounds import listed, shown
from vllm.v1.residual.layer_selectors import parse_layers
from vllm.v1.residual.numbers import is_integer
from vllm.v1.residual.selectors import as_list
from vllm.v1.residual.tap import hook_name, why_not
from vllm.v1.steering.errors import fail


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a prompt's text, which stands for the tokens that contain it."""

    text: str
    occurrence: int | None = None
    """Which one, from 0, if the text occurs several times."""
    source: str | None = None
    """The text that stands in its place in the other prompt, aligned token by token
    from its end; None: the tokens that the prompts' alignment gives."""


class Column(NamedTuple):
    """One column of a grid: positions that are patched together."""

    targets: tuple[int, ...]
    sources: tuple[int, ...]
    """The position in the source of each target."""
    reason: str | None = None
    """Why it cannot be patched; None if it can."""


class Prompt(NamedTuple):
    """A prompt's tokens, and each token's stretch of the prompt's text."""

    token_ids: tuple[int, ...]
    texts: tuple[str, ...]
    """The text that each token adds."""

    def tokens_of(self, span: str, occurrence: int | None, at: str) -> range:
        """The positions of the tokens that contain a text.

        Raises:
            SteeringValidationError: the prompt does not have it, or has it several
                times and `occurrence` does not say which.

        """
        whole = "".join(self.texts)
        starts = [n for n in range(len(whole)) if span and whole.startswith(span, n)]
        if not starts:
            raise fail(f"{at}: the prompt has no text {shown(span)}", at, span)
        if occurrence is None and len(starts) > 1:
            raise fail(
                f"{at}: the prompt has {shown(span)} {len(starts)} times; say which by "
                '"occurrence", from 0',
                at,
                span,
            )
        if not 0 <= (occurrence or 0) < len(starts):
            raise fail(
                f"{at}.occurrence: the prompt has {shown(span)} {len(starts)} times, "
                "counted from 0",
                f"{at}.occurrence",
                occurrence,
            )
        first = starts[occurrence or 0]
        stop, place, found = first + len(span), 0, []
        for position, text in enumerate(self.texts):
            if place < stop and place + len(text) > first:
                found.append(position)
            place += len(text)
        return range(found[0], found[-1] + 1)


def prompt_of(token_ids: Sequence[int], decode: Callable[[list[int]], str]) -> Prompt:
    """A prompt with the text of each token, as decoding adds it."""
    ids, texts, before = list(token_ids), [], ""
    for stop in range(1, len(ids) + 1):
        text = decode(ids[:stop])
        if text.endswith("\N{REPLACEMENT CHARACTER}") and stop < len(ids):
            texts.append("")  # A part of a character, whose last token has it.
            continue
        texts.append(text[len(before) :] if text.startswith(before) else "")
        before = text
    return Prompt(tuple(ids), tuple(texts))


def columns_of(
    raw: Any, target: Prompt, source: Prompt, alignment: Alignment, at: str
) -> list[Column]:
    """The columns of a grid.

    Args:
        raw: `"all"` or `"all_prompt"` for every token of the target, `"together"` for
            one column of all that have a counterpart, or a list whose items are
            positions (negative ones count from the end), lists of positions that are
            patched together, and spans (`Span`, or objects with its fields), which give
            a column for each of their tokens.
        target: the prompt that is patched.
        source: the prompt whose rows are inserted.
        alignment: of the two.
        at: the parameter's name in messages.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    every = range(len(target.token_ids))
    if isinstance(raw, str) and raw in ("all", "all_prompt"):
        raw = every
    elif isinstance(raw, str) and raw == "together":
        raw = [[p for p in every if alignment.source_of(p) is not None]]
    items = as_list(raw)
    if not isinstance(items, (list, tuple)) or not items:
        raise fail(
            f'{at} must be "all", or list positions, lists of positions, and '
            'spans {"span": text}',
            at,
            raw,
        )
    columns: list[Column] = []
    for number, item in enumerate(items):
        where, item = f"{at}[{number}]", as_list(item)
        if isinstance(item, (Span, Mapping)):
            columns += _of_span(_span(item, where), target, source, alignment, where)
        else:
            group = item if isinstance(item, (list, tuple)) else [item]
            columns.append(_aligned(group, alignment, where))
    return columns


def _span(item: Any, at: str) -> Span:
    if isinstance(item, Span):
        return item
    known = {"span", "occurrence", "source"}
    if not isinstance(item.get("span"), str) or item.keys() - known:
        raise fail(f"{at} must be an object with the keys {sorted(known)}", at, item)
    occurrence, source = item.get("occurrence"), item.get("source")
    if occurrence is not None and not is_integer(occurrence):
        raise fail(f"{at}.occurrence must be a number", f"{at}.occurrence", occurrence)
    if source is not None and not isinstance(source, str):
        raise fail(f"{at}.source must be text", f"{at}.source", source)
    return Span(item["span"], occurrence, source)


def _of_span(
    span: Span, target: Prompt, source: Prompt, alignment: Alignment, at: str
) -> list[Column]:
    tokens = target.tokens_of(span.text, span.occurrence, at)
    if span.source is None:
        return [_aligned([position], alignment, at) for position in tokens]
    repeated = "".join(source.texts).count(span.source) > 1
    which = span.occurrence if repeated else None
    others = source.tokens_of(span.source, which, f"{at}.source")
    columns = []
    for position in tokens:
        other = position - tokens[-1] + others[-1]
        if other in others:
            columns.append(Column((position,), (other,)))
        else:
            reason = f"{span.source!r} has {len(others)} tokens, {span.text!r} more"
            columns.append(Column((position,), (), reason))
    return columns


def _aligned(group: Sequence[Any], alignment: Alignment, at: str) -> Column:
    count = alignment.num_target
    for position in group:
        if not is_integer(position, -count, count):
            raise fail(
                f"{at}: {shown(position)} is no position of a prompt of {count} tokens",
                at,
                position,
            )
    targets = tuple(sorted({int(p) % count for p in group}))
    if not group or len(targets) != len(group):
        raise fail(f"{at} must list distinct positions", at, list(group))
    sources = [alignment.source_of(position) for position in targets]
    found = tuple(position for position in sources if position is not None)
    if len(found) < len(targets):
        return Column(targets, (), "the prompts differ in length here: no counterpart")
    return Column(targets, found)


MOST_CELLS = 1 << 18
"""Most cells of a sweep."""
READ_BY_OTHERS = ("embed", "pre_attn", "attn_in", "k", "v")
"""Hook points at which a token's row reaches other tokens in the same layer."""


class Facts(NamedTuple):
    """What a sweep needs to know of an engine."""

    hook_points: Mapping[int, Sequence[str]]
    """The hook points of each layer."""
    heads: Mapping[str, int]
    """The number of heads, of hook points that have heads."""
    max_length: int
    """Most tokens of a request."""
    vocabulary: int
    most_logprobs: int
    """Most log-probabilities of likely tokens that a request may have."""
    keeper: tuple[str, str] | None
    """The consumer that keeps rows, and the key of its specs that has the name."""

    @property
    def last_layer(self) -> int:
        """The last layer."""
        return max(self.hook_points)


class Cell(NamedTuple):
    """One patch of a grid."""

    hook: str
    layer: int
    head: int | None
    column: Column
    place: tuple[int, ...]
    """Its index in the hook point's array."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The axes of a sweep."""

    hooks: tuple[str, ...]
    layers: tuple[int, ...]
    heads: tuple[int, ...] | None
    columns: tuple[Column, ...]
    having: Mapping[str, frozenset[int]]
    """The layers that have each hook point."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of each hook point's array: layers, heads if there are any, columns."""
        heads = () if self.heads is None else (len(self.heads),)
        return (len(self.layers), *heads, len(self.columns))

    def cells(self) -> Iterator[Cell]:
        """All cells, those of a layer after those of the layers before it.

        Cells next to each other have different positions, so that all steps have about
        as many tokens. Those of late positions compute few and wait for the host.
        """
        for hook in self.hooks:
            for row, layer in enumerate(self.layers):
                for at, head in enumerate(self.heads or [None]):
                    middle = () if head is None else (at,)
                    for number, column in enumerate(self.columns):
                        place = (row, *middle, number)
                        yield Cell(hook, layer, head, column, place)

    def taps(self) -> dict[str, list[int]]:
        """The layers of the grid that have each hook point."""
        return {
            hook: [layer for layer in self.layers if layer in self.having[hook]]
            for hook in self.hooks
        }


def grid_of(
    hooks: Any, layers: Any, heads: Any, columns: Sequence[Column], facts: Facts
) -> Grid:
    """Check the axes of a sweep.

    Args:
        hooks: a name or a list of names.
        layers: a selector of layers; `"all"` of those that have a hook point.
        heads: a list of heads, or `"all"`; None to patch whole rows.
        columns: of the grid.
        facts: about the engine.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    names = [hooks] if isinstance(hooks, str) else as_list(hooks)
    if not isinstance(names, (list, tuple)) or not names:
        raise fail("hooks must name at least one hook point", "hooks", hooks)
    having: dict[str, frozenset[int]] = {}
    for name in names:
        hook, at = _hook(name, facts)
        if hook in having:
            raise fail(f"hooks: {hook} is given twice", "hooks", name)
        having[hook] = at
    everywhere = sorted(frozenset().union(*having.values()))
    number = facts.last_layer + 1
    chosen = set(parse_layers(layers, everywhere, number, "layers", fail))
    if layers != "all":
        for hook, at in having.items():
            if chosen - at:
                raise fail(
                    f"layers: layer {min(chosen - at)} of this model does not have "
                    f"{hook}; these have it: {listed(sorted(at))}",
                    "layers",
                    min(chosen - at),
                )
    wanted = None if heads is None else _heads(heads, list(having), facts)
    found = Grid(tuple(having), tuple(sorted(chosen)), wanted, tuple(columns), having)
    count = len(found.hooks)
    for size in found.shape:
        count *= size
    if count > MOST_CELLS:
        raise fail(
            f"layers: the grid has {count} cells, and at most {MOST_CELLS} are "
            "allowed; sweep fewer layers, positions or hook points",
            "layers",
            count,
        )
    return found


def _hook(name: Any, facts: Facts) -> tuple[str, frozenset[int]]:
    """Our name of a hook point, and the layers that have it."""
    known = hook_name(name) if isinstance(name, str) else None
    having = [n for n, points in facts.hook_points.items() if known in points]
    if known is None or not having:
        every = sorted({point for one in facts.hook_points.values() for point in one})
        why = "" if known is None else why_not(known)
        raise fail(
            f"hooks: this engine has no hook point {shown(name)}; it has {every}"
            f"{why}. Points inside the block need --hook-points",
            "hooks",
            name,
        )
    return known, frozenset(having)


def _heads(raw: Any, hooks: Sequence[str], facts: Facts) -> tuple[int, ...]:
    counts = {facts.heads.get(hook, 0) for hook in hooks}
    if counts == {0} or len(counts) > 1:
        raise fail(
            f"heads: {hooks} do not all have the same heads; hook points with heads "
            f"here are {listed(sorted(facts.heads))} (--hook-points q k v z)",
            "heads",
            raw,
        )
    count = counts.pop()
    if isinstance(raw, str) and raw == "all":
        return tuple(range(count))
    heads = as_list(raw)
    if not isinstance(heads, (list, tuple)) or not heads:
        raise fail('heads must be "all", or list heads', "heads", raw)
    for head in heads:
        if not is_integer(head, 0, count):
            raise fail(f"heads: {hooks[0]} has heads 0 to {count - 1}", "heads", head)
    return tuple(sorted({int(head) for head in heads}))
