# SPDX-License-Identifier: Apache-2.0
"""The key `from` of an entry: rows of a kept run, of a module, or zeros."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch

from vllm.v1.residual.bounds import listed, shown
from vllm.v1.residual.selectors import as_list, parse_positions
from vllm.v1.residual.spans import NAMED, selected
from vllm.v1.residual.tap import Tap
from vllm.v1.steering.errors import fail
from vllm.v1.steering.plan import SteeringTiers
from vllm.v1.steering.spec.packed import from_bfloat16
from vllm.v1.steering.spec.table import Array

if TYPE_CHECKING:
    from vllm.v1.steering.spec.parse import SteeredModel


class KeptRun(Protocol):
    """The rows of one request that were kept."""

    num_prompt_tokens: int
    rows: Any
    """Rows `[rows, width]` by tap; its `positions` has those of each tap's rows."""


Runs: TypeAlias = Callable[[str, str], KeptRun]
"""`runs(name, where)`: the kept run of a name; refuses unknown names."""


class Sources(NamedTuple):
    """What entries may take rows from, by name."""

    run: Runs
    module: Callable[[str, str], SteeringTiers]
    """`module(name, where)`: a registered set of vectors; refuses unknown names."""


def no_run(name: str, where: str) -> KeptRun:
    """Refuse every name."""
    raise fail(f"{where}: no run is kept here; give the vectors", where, name)


def _no_module(name: str, where: str) -> SteeringTiers:
    raise fail(f"{where}: there are no modules here; give the vector", where, name)


NO_SOURCES = Sources(no_run, _no_module)


def with_rows(
    raw: Mapping[str, Any], tap: Tap, model: "SteeredModel", at: str
) -> Mapping[str, Any]:
    """Replace the key `from` of an entry by the vectors that it names.

    Args:
        raw: the entry. `from` is `"zeros"`, a module's name, or `{"run", "positions"}`,
            where the run's positions are those of the entry if they are left out.
        tap: where the entry acts, and where the rows were.
        model: the model, and what rows are taken from.
        at: the entry's name in messages.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    source, where = raw["from"], f"{at}.from"
    if "vector" in raw or "vectors" in raw:
        raise fail(f"{at}: give either from, or vectors", where, sorted(map(str, raw)))
    rest = {key: value for key, value in raw.items() if key != "from"}
    if source == "zeros":
        return {**rest, "vector": np.zeros(model.hidden_size, dtype=np.float32)}
    if isinstance(source, str):
        return {**rest, "vector": _of_module(source, tap, model, where)}
    run = source.get("run") if isinstance(source, Mapping) else None
    if not isinstance(run, str) or source.keys() - {"run", "positions"}:
        raise fail(
            f'{where} must be {{"run": name, "positions": ...}}, the name of a module, '
            'or "zeros"',
            where,
            source,
        )
    positions = as_list(source.get("positions", raw.get("positions")))
    rows = _of_run(model.sources.run(run, f"{where}.run"), tap, positions, where, run)
    if len(rows) == 1 and rest.get("positions") != "all_prompt":
        return {**rest, "vector": rows[0]}
    return {**rest, "vectors": rows}


def _of_module(name: str, tap: Tap, model: "SteeredModel", where: str) -> Array:
    base = model.sources.module(name, where).base
    found = {} if base is None else base.unpack()
    if tap not in found:
        layer, hook = tap
        raise fail(
            f"{where}: the module {shown(name)} has no vector at {hook} of layer "
            f"{layer} that is added at every token; it has {listed(sorted(found))}",
            where,
            name,
        )
    return found[tap]


def _of_run(run: KeptRun, tap: Tap, positions: Any, where: str, name: str) -> Array:
    """The rows `[n, width]` at positions of a run, in the order of a list."""
    layer, hook = tap
    if tap not in run.rows:
        raise fail(
            f"{where}: the run {shown(name)} has no rows at {hook} of layer {layer}; "
            f"it has {listed([f'{h}.{n}' for n, h in sorted(run.rows)])}. Capture them",
            where,
            name,
        )
    kept = run.rows.positions[tap]
    wanted = _wanted(positions, run.num_prompt_tokens, f"{where}.positions")
    places = [bisect_left(kept, position) for position in wanted]  # Ascending.
    for position, place in zip(wanted, places, strict=True):
        if place == len(kept) or kept[place] != position:
            raise fail(
                f"{where}.positions: the run {shown(name)} has no row at position "
                f"{position}; it has {listed(kept)}, of a prompt of "
                f"{run.num_prompt_tokens} tokens",
                f"{where}.positions",
                position,
            )
    # PyTorch would wake all of its threads, which then wait actively: half a
    # millisecond, and all cores, for each cell of a sweep. NumPy has no bfloat16.
    rows = run.rows[tap]
    if rows.dtype != torch.bfloat16:
        return rows.numpy()[places].astype(np.float32, copy=False)
    return from_bfloat16(rows.view(torch.uint16).numpy()[places])


def _wanted(raw: Any, num_prompt: int, where: str) -> Sequence[int]:
    """Positions of a run, without negative ones."""
    if raw is None:
        raise fail(f"{where}: name the positions of the run's rows", where, raw)
    spans = parse_positions(raw, where, fail)
    if isinstance(raw, (list, tuple)):
        return [int(n) + (num_prompt if n < 0 else 0) for n in raw]
    named = NAMED.get(spans) if isinstance(spans, str) else spans
    if named is None:
        raise fail(
            f"{where}: name positions of the prompt, such as all_prompt", where, raw
        )
    return selected(named, num_prompt, 0, num_prompt)
