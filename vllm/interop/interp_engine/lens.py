# SPDX-License-Identifier: Apache-2.0
"""Reads lenses at every position, as an engine's steps arrive."""

from bisect import bisect_left
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from vllm.interop.interp_engine.steering import Tiers
from vllm.interop.interp_engine.types import LensStep
from vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllm.interop.interp_engine.model import ServedModel

Part = tuple[str, int]
"""A readout's name, and the index of one of its taps."""


async def read_lenses(
    model: "ServedModel",
    prompt: list[int],
    lenses: Sequence[Any],
    point: str,
    top_n: int,
    skip_before: int,
    tiers: Tiers,
    params: SamplingParams,
) -> AsyncIterator[LensStep]:
    """Yield a step per position from `skip_before`.

    `tiers` say where the request is steered. `params` must generate one token more
    than is read. A stop token ends the iteration after its own step.
    """
    wanted = max(params.max_tokens or 1, 1) - 1
    first = min(max(skip_before, 0), len(prompt))
    readouts, parts = _readouts(model, lenses, point, top_n, tiers)
    end = len(prompt) + wanted
    if first >= end:
        return
    for one in readouts.values():
        one["positions"] = list(range(first, end)) if first else "all"
    params.readouts = readouts
    tokens, shown = list(prompt), first
    stop = model.tokenizer.eos_token_id
    async for output in model._outputs(prompt, params):
        tokens += output.outputs[0].token_ids
        found = output.outputs[0].readouts or {}
        for position in _news(found, shown):
            yield _step(found, parts, position, tokens, len(prompt))
            shown = position + 1
            if position >= len(prompt) and tokens[position] == stop:
                return


def _readouts(
    model: "ServedModel",
    lenses: Sequence[Any],
    point: str,
    top_n: int,
    tiers: Tiers,
) -> tuple[dict[str, dict[str, Any]], list[list[Part]]]:
    """The readouts, and for each lens the places of its layers' results in them."""
    from vllm.interop.interp_engine.model import jacobian_module

    readouts: dict[str, dict[str, Any]] = {}
    parts: list[list[Part]] = []
    for lens in lenses:
        maps: list[int] = []
        if lens.jacobian:
            name = lens.jacobian_set
            if name not in model.jacobians:
                raise ValueError(
                    f"jacobian_set {name!r} is not installed; there are "
                    f"{sorted(model.jacobians)}: call set_lens_jacobians"
                )
            maps = model.jacobians[name]
        own: list[Part] = []
        for layer in lens.layers:
            at, hook = model._tap(f"{point}.{layer}", tiers)
            translated = layer in maps
            if translated and at != layer:
                raise ValueError(
                    f"layer {layer} is steered where it is read, and a Jacobian "
                    "belongs to its own layer: steer at another point"
                )
            module = jacobian_module(lens.jacobian_set) if translated else ""
            # One readout per hook point and map; layers of several lenses share it.
            key = f"{hook}/{module}"
            spec = readouts.setdefault(
                key, {"kind": "lens", "hook": hook, "top_k": top_n, "layers": []}
            )
            if module:
                spec["translator"] = module
            if at not in spec["layers"]:
                spec["layers"].append(at)
            own.append((key, at))
        parts.append(own)
    return readouts, parts


def _news(found: Mapping[str, Any], shown: int) -> list[int]:
    """Positions from `shown` on for which all readouts are there."""
    if not found:
        return []
    for result in found.values():
        if result.error is not None:
            raise RuntimeError(f"the lens failed: {result.error}")
    common = set.intersection(*(set(one.positions) for one in found.values()))
    return sorted(position for position in common if position >= shown)


def _step(
    found: Mapping[str, Any],
    parts: Sequence[Sequence[Part]],
    position: int,
    tokens: Sequence[int],
    num_prompt_tokens: int,
) -> LensStep:
    ids, probabilities = [], []
    for own in parts:
        places = []
        for key, layer in own:
            result = found[key]
            layers = [tap[0] for tap in result.taps]
            row = bisect_left(result.positions, position)
            places.append((result, row, layers.index(layer)))
        ids.append(
            torch.stack([torch.from_numpy(r["token_ids"][n, t]) for r, n, t in places])
        )
        logs = [torch.from_numpy(r["logprobs"][n, t]) for r, n, t in places]
        probabilities.append(torch.stack(logs).exp())
    return LensStep(
        position,
        int(tokens[position]),
        position >= num_prompt_tokens,
        ids,
        probabilities,
    )
