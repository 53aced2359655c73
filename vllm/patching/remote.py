# SPDX-License-Identifier: Apache-2.0
"""Runs a sweep on a server, through a client of it."""

import math
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.patching.grid import Span
from vllm.patching.offline import OnCell, progress_bar
from vllm.patching.planning import OWN, Sweep
from vllm.patching.result import PatchResult, Skipped
from vllm.v1.residual.selectors import as_list
from vllm.v1.steering.spec.table import Array, as_array

if TYPE_CHECKING:
    from clearbox_client import Client


def run(
    client: "Client", sweep: Sweep, progress: bool, on_cell: OnCell | None, keep: bool
) -> PatchResult:
    """Run a sweep on a server; the arguments are those of `offline.run`.

    Raises:
        ClearboxError: the server has refused the sweep, or fails during it.

    """
    found: PatchResult | None = None
    fields = {**fields_of(sweep), "keep_source": keep}
    events = client.patch_events(fields.pop("prompt"), **fields)
    with closing(events), progress_bar(0, progress) as bar:
        try:
            for event in events:
                if event["type"] == "start":
                    found = _begun(event)
                    bar.total = sum(one.size for one in found.values.values())
                elif event["type"] == "cell" and found is not None:
                    bar.update(1)
                    _take(found, event, on_cell)
                elif found is not None:
                    _end(found, event)
        except KeyboardInterrupt:
            if found is None:
                raise
    assert found is not None, "a sweep starts"
    return found


def fields_of(sweep: Sweep) -> dict[str, Any]:
    """The fields of `POST /v1/patch_sweep`."""
    rows: list[Array] = []
    fields: dict[str, Any] = {
        "prompt": sweep.prompt,
        "clean_prompt": sweep.other,
        "source_run": sweep.run,
        "hooks": sweep.hooks,
        "layers": as_list(sweep.layers),
        "positions": places(sweep.positions),
        "heads": as_list(sweep.heads),
        "metric": sweep.metric,
        "answer": sweep.answer,
        "foil": sweep.foil,
        "effect": sweep.effect,
        "alpha": sweep.alpha,
        "noise": sweep.noise,
        "seed": sweep.seed,
    }
    if sweep.subject is not None:
        fields["subject"] = places(sweep.subject)
    if isinstance(sweep.source, str):
        own = sweep.source in ("zeros", *OWN)
        fields["source" if own else "source_module"] = sweep.source
    elif sweep.source is not None:
        fields["source_inline"] = len(rows)
        rows.append(as_array(sweep.source, "source"))
    mask = sweep.mask
    if mask is not None and not isinstance(mask, dict):
        mask = {"inline": len(rows)}
        rows.append(as_array(sweep.mask, "mask"))
    fields["mask"] = mask
    if rows:
        from clearbox_client.vectors import pack_rows

        fields["patch_vectors"] = pack_rows(np.stack(rows))
    return fields


def places(raw: Any) -> Any:
    """Positions as the route takes them, in which spans are objects."""
    raw = as_list(raw)
    if isinstance(raw, (list, tuple)):
        return [places(one) for one in raw]
    if not isinstance(raw, Span):
        return raw
    given = {"span": raw.text, "occurrence": raw.occurrence, "source": raw.source}
    return {name: one for name, one in given.items() if one is not None}


def _begun(event: dict[str, Any]) -> PatchResult:
    """A result without values."""
    heads = event.get("heads")
    positions = [p if isinstance(p, list) else [p] for p in event["positions"]]
    middle = [] if heads is None else [len(heads)]
    shape = [len(event["layers"]), *middle, len(positions)]
    return PatchResult(
        values={hook: np.full(shape, math.nan, np.float32) for hook in event["hooks"]},
        layers=tuple(event["layers"]),
        heads=None if heads is None else tuple(heads),
        positions=tuple(map(tuple, positions)),
        tokens=tuple(event["tokens"]),
        metric=event["metric"],
    )


def _take(found: PatchResult, event: dict[str, Any], on_cell: OnCell | None) -> None:
    group = event["position"]
    group = tuple(group) if isinstance(group, list) else (group,)
    head = [] if found.heads is None else [found.heads.index(event["head"])]
    row = found.layers.index(event["layer"])
    place = (row, *head, found.positions.index(group))
    value = event["value"]
    found.values[event["hook"]][place] = math.nan if value is None else value
    if on_cell is not None:
        on_cell(found.at(event["hook"], place))


def _end(found: PatchResult, event: dict[str, Any]) -> None:
    """What is known at the end, also of cells whose position occurs twice."""
    for one in event["hook_grids"]:
        found.values[one["hook"]][:] = np.array(one["grid"], np.float32)
    numbers = (event[name] for name in ("clean", "corrupt", "noise_floor"))
    found.clean, found.corrupt, found.noise_floor = (
        math.nan if one is None else one for one in numbers
    )
    found.skipped = [
        Skipped(s["hook"], s["layer"], s.get("head"), s["position"], s["reason"])
        for s in event["skipped"]
    ]
