# SPDX-License-Identifier: Apache-2.0
"""Parses what users write (hooks, layers, lists, packed data) to vectors."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from msgspec import structs

from vllm.v1.residual.bounds import shown
from vllm.v1.residual.layer_selectors import parse_layers
from vllm.v1.residual.numbers import layer_index
from vllm.v1.residual.selectors import as_list
from vllm.v1.residual.tap import (
    HOOK_NAMES,
    INNER_POINTS,
    READ_ONLY,
    Shapes,
    Tap,
    did_you_mean,
    hook_name,
    parse_address,
    why_not,
)
from vllm.v1.steering.errors import fail
from vllm.v1.steering.plan import Operation, Vector
from vllm.v1.steering.spec.entry import Entry, parse_entry
from vllm.v1.steering.spec.matrix import ALL_GENERATED, joined_rows
from vllm.v1.steering.spec.named import NONE_NAMED, NamedFiles
from vllm.v1.steering.spec.packed import unpack_array
from vllm.v1.steering.spec.placement import ONE_RANK, Placement
from vllm.v1.steering.spec.sources import NO_SOURCES, Sources
from vllm.v1.steering.spec.table import Array, check_finite, is_packed

HOOKS = tuple(name for name in HOOK_NAMES if name not in READ_ONLY)

MAX_ROWS = 4096
"""Most rows of one packed form."""

MAX_ENTRIES = 4096
"""Most entries of one tier at one hook point of one layer."""

PACKED_KEYS = {"dtype", "shape", "layer_indices", "data", "scales"}
SHARED_KEYS = (
    "op",
    "positions",
    "norm_match",
    "alpha",
    "min",
    "max",
    "value",
    "strength",
)
"""Entry keys that a packed form may have, which apply to all of its rows."""


@dataclass(frozen=True, slots=True)
class SteeredModel:
    """The facts about a model and server that a vector must fit."""

    hook_points: Mapping[int, Sequence[str]]
    """The hook points of each layer."""
    hidden_size: int
    dtype: torch.dtype
    """Dtype of the residual stream."""
    max_operations: int = 8
    """Most operations on one token at one hook point."""
    bank_bytes: int = 256 << 20
    """Bytes of device memory for the vectors of operations."""
    max_length: int = 1 << 31
    """Most tokens of a request."""
    named: NamedFiles = NONE_NAMED
    """The probes and SAEs that entries may name."""
    placement: Placement = ONE_RANK
    sources: Sources = NO_SOURCES
    """What entries may take rows from."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Why no layer has an enabled hook point, by name."""
    shapes: Shapes = field(default_factory=dict)
    """Of hook points that differ from the stream."""

    @property
    def num_sites(self) -> int:
        """Number of hook points of all layers."""
        return sum(map(len, self.hook_points.values()))


@dataclass(frozen=True, slots=True)
class Parsed:
    """One parsed and checked tier."""

    vectors: dict[Tap, Vector] = field(default_factory=dict)
    """Scaled vectors that are added at every token, by tap."""
    operations: list[Operation] = field(default_factory=list)
    """All other operations."""
    entries: list[Entry] = field(default_factory=list)
    """The entries of which both consist."""
    generated: "Parsed | None" = None
    """Entries with positions `all_generated`, which act on generated tokens only."""

    def __deepcopy__(self, memo: Any) -> "Parsed":
        return self  # The object is not changed after parsing.


def parse_vectors(raw: Any, model: SteeredModel, where: str) -> Parsed:
    """Parse `{hook: {layer: entry}}` to vectors and operations.

    Args:
        raw: `{hook: {layer: entry}}`, or for a hook the packed form `{"dtype",
            "shape", "layer_indices", "data", "scales"?}`, or `{address: entry}`. An
            entry is a vector, an object with the keys of `entry.KEYS`, or a list of
            such objects. A vector is a list, a numpy array or a tensor. Layers and
            addresses are those of `layer_selectors.py` and `tap.py`.
        model: the model that the vectors must fit.
        where: the parameter's name in messages, such as `steering_vectors`.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    if not isinstance(raw, Mapping) or not raw:
        raise fail(
            f"{where} must map at least one hook point to vectors by layer, for "
            'example {"post_block": {"3": [0.1, ...]}}; omit it for no steering',
            where,
            raw,
        )
    seen: set[Tap] = set()
    parsed, generated = Parsed(), Parsed()
    for hook, layers, at in _by_hook(raw, where):
        if isinstance(layers, Mapping) and "data" in layers:
            entries = _unpack(layers, at)
        else:
            entries = _by_layer(layers, hook, model, at)
        written: Written = {}
        for layer, these in entries:
            tap = _checked_tap(layer, hook, model, at)
            if tap in seen:
                raise fail(f"{at}: layer {layer} is given twice", at, layer)
            seen.add(tap)
            _check_count(len(these), f"{at}.{layer}")
            for entry in these:
                to = generated if _is_generated(entry) else parsed
                _take(to, tap, entry, model, f"{at}.{layer}", written)
    for one in (parsed, generated):
        if one.operations:
            one.operations[:] = joined_rows(one.operations)
    return replace(parsed, generated=generated) if generated.entries else parsed


def _is_generated(entry: Mapping[str, Any]) -> bool:
    positions = entry.get("positions")
    return isinstance(positions, str) and positions == ALL_GENERATED


def _by_hook(raw: Mapping[Any, Any], where: str) -> Iterator[tuple[str, Any, str]]:
    """The canonical hook point, the value and the name in messages of each key.

    A key is a hook point's name, or an address that includes the layer.
    """
    for name, given in raw.items():
        at = f"{where}.{name}"
        hook = hook_name(name) if isinstance(name, str) else None
        tap = parse_address(name) if isinstance(name, str) else None
        if hook is not None:
            yield hook, given, at
        elif tap is not None:
            layer, of_layer = tap
            yield of_layer, {layer: given}, at
        else:
            raise fail(
                f"{where}: {shown(name)} is not a hook point; the hook points are "
                f"{list(HOOKS)}, and addresses such as post_block.3"
                f"{did_you_mean(name)}",
                where,
                name,
            )


def together(one: Parsed, other: Parsed) -> Parsed:
    """Join two tiers that act on the same tokens; operations of `one` come first."""
    vectors = dict(one.vectors)
    with np.errstate(over="ignore"):  # Admission refuses sums that overflow.
        for tap, vector in other.vectors.items():
            vectors[tap] = vectors[tap] + vector if tap in vectors else vector
    generated = one.generated or other.generated
    if one.generated is not None and other.generated is not None:
        generated = together(one.generated, other.generated)
    return Parsed(
        vectors,
        [*one.operations, *other.operations],
        [*one.entries, *other.entries],
        generated,
    )


def by_phase(
    parsed: Mapping[str, Parsed], names: Mapping[str, str]
) -> dict[str, Parsed]:
    """Move entries for generated tokens only to the decode tier.

    Args:
        parsed: parsed tiers by name.
        names: the parameters' names in messages, by tier.

    Raises:
        SteeringValidationError: such an entry is in the prefill tier.

    """
    found = dict(parsed)
    for tier, one in parsed.items():
        if one.generated is None:
            continue
        if tier == "prefill":
            at = f"{names[tier]}.positions"
            raise fail(
                f"{at}: {names[tier]} acts on prompt tokens, of which none is "
                f"generated; move the entry to {names['decode']}",
                at,
                ALL_GENERATED,
            )
        found[tier] = replace(one, generated=None)
        found["decode"] = together(one.generated, found.get("decode", Parsed()))
    order = [tier for tier in names if tier in found]
    return {tier: found[tier] for tier in order}


Written: TypeAlias = dict[int, tuple[Mapping[str, Any], Entry, Array, list[Operation]]]
"""By identity of an object at one hook point: the object, the entry that it became, its
scaled vector and its operations. Often one is written for all layers."""


def _take(
    parsed: Parsed,
    tap: Tap,
    raw: Mapping[str, Any],
    model: SteeredModel,
    at: str,
    written: Written,
) -> None:
    """Add one entry to a parsed tier."""
    if id(raw) in written:
        _, entry, scaled, operations = written[id(raw)]
        entry = entry.moved(tap, at)
        operations = [structs.replace(one, layer=tap[0]) for one in operations]
    else:
        everywhere = {**raw, "positions": None} if _is_generated(raw) else raw
        entry = parse_entry(everywhere, tap, model, at)
        scaled = entry.scaled(model, at)
        operations = [] if entry.is_plain else entry.operations()
        if entry.op != "feature" and tap[1] not in INNER_POINTS and "from" not in raw:
            written[id(raw)] = raw, entry, scaled, operations
    parsed.entries.append(entry)
    parsed.operations.extend(operations)
    if entry.is_plain:
        before = parsed.vectors.get(tap)
        if before is not None:
            scaled = check_finite(before + scaled, model.dtype, at)
        parsed.vectors[tap] = scaled


def _check_count(count: int, at: str) -> None:
    if count > MAX_ENTRIES:
        raise fail(
            f"{at}: at most {MAX_ENTRIES} entries act at one hook point of one layer; "
            "add up those that only add",
            at,
            count,
        )


Entries = list[tuple[int, list[Mapping[str, Any]]]]


def _by_layer(layers: Any, hook: str, model: SteeredModel, at: str) -> Entries:
    if not isinstance(layers, Mapping) or not layers:
        raise fail(
            f"{at} must map at least one layer to a vector, or be a packed form "
            f"with the keys {sorted(PACKED_KEYS)}",
            at,
            layers,
        )
    entries: Entries = []
    for key, entry in layers.items():
        these: list[Mapping[str, Any]] = [{"vector": entry}]
        if isinstance(entry, Mapping) and not is_packed(entry):
            these = [entry]
        elif _is_list_of_entries(entry, f"{at}.{key}"):
            these = list(entry)
        entries += [(layer, these) for layer in _layers(key, hook, model, at)]
    return entries


def _layers(key: Any, hook: str, model: SteeredModel, at: str) -> list[int]:
    """The layers of a key: an index, or a text selector of layers."""
    if not isinstance(key, str) or key.isdigit():
        return [_layer_index(key, at)]
    having = [n for n, points in sorted(model.hook_points.items()) if hook in points]
    return parse_layers(key, having, max(model.hook_points) + 1, at, fail)


def _is_list_of_entries(entry: Any, at: str) -> bool:
    if not isinstance(entry, (list, tuple)) or not entry:
        return False
    if not isinstance(entry[0], Mapping):
        return False
    for number, one in enumerate(entry):
        if not isinstance(one, Mapping):
            raise fail(
                f"{at}[{number}]: a list of entries has objects only; give a vector "
                'as {"vector": [...]}',
                f"{at}[{number}]",
                one,
            )
    return True


def _layer_index(key: Any, at: str) -> int:
    found = layer_index(key)
    if found is None:
        raise fail(f"{at}: a layer must be a 0-based index, not {shown(key)}", at, key)
    return found


def _checked_tap(layer: int, hook: str, model: SteeredModel, at: str) -> Tap:
    having = model.hook_points.get(layer)
    if having is None:
        layers = sorted(model.hook_points)
        raise fail(
            f"{at}: this model has no layer {layer}; its layers with hook points "
            f"are {layers[0]} to {layers[-1]}",
            at,
            layer,
        )
    if hook not in having:
        raise fail(
            f"{at}: layer {layer} of this model has no hook point {hook!r}; it has "
            f"{list(having)}{why_not(hook, model.missing)}",
            at,
            layer,
        )
    if hook in READ_ONLY:
        raise fail(
            f"{at}: {hook} is read-only: its numbers are those of experts; change "
            "router_logits to force one, or expert_weights",
            at,
            hook,
        )
    return layer, hook


def unpacked(layers: Any, at: str) -> dict[int, Any]:
    """Convert a hook point's value to `{layer: entry}`.

    Args:
        layers: `{layer: entry}`, or the packed form.
        at: the parameter's name in messages.

    Raises:
        SteeringValidationError: it is neither of the two.

    """
    if isinstance(layers, Mapping) and "data" in layers:
        return {layer: entries[0] for layer, entries in _unpack(layers, at)}
    if not isinstance(layers, Mapping):
        raise fail(f"{at} must map layers to vectors, or be packed", at, layers)
    return {_layer_index(key, at): entry for key, entry in layers.items()}


def _unpack(packed: Mapping[str, Any], at: str) -> Entries:
    unknown = sorted(str(k) for k in packed if k not in {*PACKED_KEYS, *SHARED_KEYS})
    missing = sorted(PACKED_KEYS - {"scales"} - packed.keys())
    if unknown or missing:
        raise fail(
            f"{at}: the packed form has the keys {sorted(PACKED_KEYS)} (scales is "
            f"optional), and for all rows any of {list(SHARED_KEYS)}; unknown: "
            f"{unknown}, missing: {missing}",
            at,
            sorted(map(str, packed)),
        )
    layers = as_list(packed["layer_indices"])
    if not isinstance(layers, (list, tuple)) or not 0 < len(layers) <= MAX_ROWS:
        raise fail(
            f"{at}.layer_indices must list at least one layer, and at most {MAX_ROWS}",
            f"{at}.layer_indices",
            layers,
        )
    rows = unpack_array(packed, at, dimensions=(2, 3))
    scales = as_list(packed.get("scales"))
    given = [None] * len(layers) if scales is None else scales
    is_list = isinstance(given, (list, tuple))
    if not is_list or not len(rows) == len(layers) == len(given):
        raise fail(
            f"{at}: shape[0], layer_indices and scales must have one entry per "
            f"layer; they have {len(rows)}, {len(layers)} and "
            f"{len(scales) if isinstance(scales, (list, tuple)) else shown(scales)}",
            at,
            len(layers),
        )
    shared = {key: packed[key] for key in SHARED_KEYS if key in packed}
    name = "vector" if rows.ndim == 2 else "vectors"
    entries: Entries = []
    for key, row, scale in zip(layers, rows, given, strict=True):
        entry = {name: row, **shared} | ({} if scales is None else {"scale": scale})
        entries.append((_layer_index(key, f"{at}.layer_indices"), [entry]))
    return entries
