# SPDX-License-Identifier: Apache-2.0
"""Bodies of `POST /v1/patch_sweep`, and its answers."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from vllm.entrypoints.serve.utils.json_object import flag
from vllm.interop.reference_fork.patches import inline_mask, inline_row, inline_rows
from vllm.patching.planning import OWN, Sweep
from vllm.patching.result import Found, PatchResult, plain, position_of
from vllm.patching.study import Done, Study
from vllm.v1.residual.numbers import finite_number, is_integer
from vllm.v1.steering.errors import fail

FIELDS = (
    *("model", "prompt", "clean_prompt", "source_run", "source_module"),
    *("source_inline", "patch_vectors", "mask", "alpha", "hook", "hooks", "layers"),
    *("positions", "answer_token", "answer_token_id", "foil_token", "foil_token_id"),
    *("metric", "logprobs", "stream", "clean_baseline", "keep_source"),
    # An earlier fork's route does not have these.
    *("answer", "foil", "heads", "effect", "source", "subject", "noise", "seed"),
    "resume",
)
FLAGS = ("stream", "keep_source", "resume")


def sweep_of(body: Mapping[str, Any]) -> Sweep:
    """Read a sweep from a body whose fields are known.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    given = {name: one for name, one in body.items() if one is not None}
    if "prompt" not in given:
        raise fail("prompt: give the prompt that is patched", "prompt", None)
    for name in FLAGS:
        flag(given, name, fail)
    if not is_integer(given.get("logprobs", 20), 0):
        raise fail("logprobs must be a number from 0", "logprobs", given["logprobs"])
    rows = inline_rows(given.get("patch_vectors"))
    mask = given.get("mask")
    known: dict[str, Any] = {
        "prompt": given["prompt"],
        "other": given.get("clean_prompt"),
        "run": _text(given, "source_run"),
        "source": _source(given, rows),
        "mask": None if mask is None else inline_mask(mask, rows, "mask"),
        "hooks": _one_of(given, ("hooks", "hook")) or ("post_block",),
        "layers": _layers(given.get("layers", "all")),
        "metric": given.get("metric", "logprob"),
        "answer": _answer(given, "answer"),
        "foil": _answer(given, "foil"),
        "single": tuple(n for n in ("answer", "foil") if f"{n}_token" in given),
        "noise": finite_number(given.get("noise", 3.0), "noise", fail),
        "known_source": _baseline(given),
    }
    if not is_integer(given.get("seed", 0), 0, 1 << 32):
        raise fail("seed must be a number from 0", "seed", given["seed"])
    same = ("positions", "alpha", "heads", "effect", "subject", "seed")
    return Sweep(**known, **{name: given[name] for name in same if name in given})


def _one_of(given: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """The value of the only given field of several; None without any."""
    found = [name for name in names if name in given]
    if len(found) > 1:
        raise fail(f"{found[1]}: give one of {list(names)}", found[1], found)
    return given[found[0]] if found else None


def _text(given: Mapping[str, Any], name: str) -> str | None:
    value = given.get(name)
    if value is not None and not isinstance(value, str):
        raise fail(f"{name} must be text", name, value)
    return value


def _source(given: Mapping[str, Any], rows: Any) -> Any:
    """What replaces rows if it is not a run."""
    _one_of(given, ("source_run", "source_module", "source_inline", "source"))
    if "source_inline" in given:
        return inline_row(given["source_inline"], rows, "source_inline")
    source = _text(given, "source")
    if source is not None and source not in ("zeros", *OWN):
        raise fail(f"source must be one of {['zeros', *OWN]}", "source", source)
    return source or _text(given, "source_module")


def _layers(raw: Any) -> Any:
    """A selector of layers, of a range too."""
    if not isinstance(raw, Mapping) or "start" not in raw:
        return raw
    step = raw.get("step", 1)
    known = raw.keys() <= {"start", "stop", "step"}
    numbers = [raw["start"], raw.get("stop"), step]
    if not known or not all(is_integer(n, 0, 1 << 16) for n in numbers) or not step:
        raise fail(
            'layers must be a list, a selector, or {"start", "stop", "step"} with '
            "stop excluded",
            "layers",
            raw,
        )
    return list(range(raw["start"], raw["stop"], step))


def _answer(given: Mapping[str, Any], name: str) -> Any:
    """Text or ids of an answer."""
    text, number = f"{name}_token", f"{name}_token_id"
    found = _one_of(given, (name, text, number))
    if number in given and not is_integer(found):
        raise fail(f"{number} must be a token's id", number, found)
    return _text(given, text) if text in given else found


def _baseline(given: Mapping[str, Any]) -> float:
    if "clean_baseline" not in given:
        return math.nan
    return finite_number(given["clean_baseline"], "clean_baseline", fail)


def start_of(study: Study) -> dict[str, Any]:
    """The event before the first cell."""
    return {"type": "start", **_axes(study), **_run(study)}


def cell_of(study: Study, done: Done) -> dict[str, Any]:
    """The event of a cell."""
    found = study.result.at(done.cell.hook, done.cell.place)
    event = {"type": "cell", "hook": found.hook, **_told(found)}
    return event if done.error is None else {**event, "error": done.error}


def _told(found: Found) -> dict[str, Any]:
    cell = {"layer": found.layer, "position": found.position}
    cell["value"] = plain(found.value)
    return cell if found.head is None else {**cell, "head": found.head}


def summary_of(study: Study) -> dict[str, Any]:
    """The whole answer; `grid[layer][position]`, or `grid[layer][head][position]`."""
    result = study.result
    grids = [
        {"hook": hook, "grid": plain(values), "argmax": _largest(result, hook)}
        for hook, values in result.values.items()
    ]
    return {
        **_axes(study),
        **_run(study),
        "grid": grids[0]["grid"],
        "argmax": grids[0]["argmax"],
        "clean": plain(result.clean),
        "corrupt": plain(result.corrupt),
        "noise_floor": plain(result.noise_floor),
        "skipped": [
            {name: one for name, one in skipped._asdict().items() if one is not None}
            for skipped in result.skipped
        ],
        "alignment": study.plan.alignment.as_json(),
        "hook_grids": grids,
    }


def _axes(study: Study) -> dict[str, Any]:
    result = study.result
    axes = {
        "layers": list(result.layers),
        "positions": [position_of(group) for group in result.positions],
        "hook": next(iter(result.values)),
        "hooks": list(result.values),
        "metric": result.metric,
        "tokens": list(result.tokens),
    }
    return axes if result.heads is None else {**axes, "heads": list(result.heads)}


def _run(study: Study) -> dict[str, Any]:
    plan = study.plan
    return {
        "auto_captured": plan.capture is not None,
        "captured_source_run": None if plan.capture is None else plan.run,
    }


def _largest(result: PatchResult, hook: str) -> dict[str, Any] | None:
    """The cell with the largest value; None if no cell has one."""
    values = result.values[hook]
    if np.isnan(values).all():
        return None
    place = np.unravel_index(np.nanargmax(values), values.shape)
    return _told(result.at(hook, tuple(map(int, place))))
