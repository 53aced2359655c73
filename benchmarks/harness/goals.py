# SPDX-License-Identifier: Apache-2.0
"""The goals of the benchmarks, by script and case, which their plots show."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound."""

    value: float
    at_most: bool = True
    """Whether the bound is an upper one, as opposed to a lower one."""


def _at_most(values: dict[str, float]) -> dict[str, Goal]:
    return {case: Goal(value) for case, value in values.items()}


DECODE_STEP = {
    "1b": _at_most(
        {
            "plain": 1.002,
            "one layer captured": 1.01,
            "all layers captured": 1.04,
            "one layer steered, 16 configs": 1.01,
            "all layers and hooks steered, 16 configs": 1.03,
            "all layers and hooks steered, 64 configs": 1.03,
            "one token clamped at all layers": 1.02,
            "all projected at one layer": 1.01,
            "all projected at all layers": 1.04,
            "all projected at all points, 16 configs": 1.08,
            "all norm-matched at one layer": 1.01,
            "all gated at one layer, acting at ten": 1.03,
            "256 programs at one point": 1.02,
        }
    ),
    "8b": _at_most(
        {
            "plain": 1.002,
            "one layer captured": 1.01,
            "all layers captured": 1.02,
            "one layer steered, 16 configs": 1.005,
            "all layers and hooks steered, 16 configs": 1.015,
            "all layers and hooks steered, 64 configs": 1.015,
            "one token clamped at all layers": 1.01,
            "all projected at one layer": 1.005,
            "all projected at all layers": 1.015,
            "all projected at all points, 16 configs": 1.04,
            "all norm-matched at one layer": 1.005,
            "all gated at one layer, acting at ten": 1.01,
            "256 programs at one point": 1.02,
        }
    ),
}
"""GPU time of a decode step over upstream's, by model."""

SERVING = {
    "mean_tpot_ms": _at_most(
        {
            "steered, one layer": 1.01,
            "steered, all layers and hooks": 1.03,
            "captured, one layer": 1.02,
            "captured, all layers": 1.06,
        }
    ),
    "mean_ttft_ms": {},
    "total_token_throughput": {
        "plain": Goal(0.99, at_most=False),
        "plain prompts": Goal(0.99, at_most=False),
        "captured prompts": Goal(0.90, at_most=False),
    },
    "start": _at_most({"seconds": 1.25, "graph_gib": 1.5}),
}
"""Ratio to upstream's, by `vllm bench`'s name of the figure."""

STORAGE = {
    "per_file": Goal(0.40, at_most=False),
    "packed": Goal(0.90, at_most=False),
    "sharded": Goal(0.90, at_most=False),
    "safetensors": Goal(0.90, at_most=False),
    "ipc": Goal(0.80, at_most=False),
    "parquet": Goal(0.35, at_most=False),
}
"""Throughput over that of a plain sequential writer, by kind of file."""

DELIVERY = {
    "of plain": {
        "large caller": Goal(0.88, at_most=False),
        "generated generated": Goal(0.95, at_most=False),
    },
    "of connector": {
        "large caller": Goal(1.5, at_most=False),
        "large packed": Goal(1.1, at_most=False),
        "large sharded": Goal(1.1, at_most=False),
        "large safetensors": Goal(1.1, at_most=False),
    },
    "of disk": {f"large {name}": goal for name, goal in STORAGE.items()},
    "milliseconds": _at_most(
        {
            "one caller": 30,
            "one, safetensors": 80,
            "one, shared memory": 80,
            "one, JSON": 900,
            "32 at once, safetensors": 1500,
            "32 at once, shared memory": 1500,
        }
    ),
}
"""Throughput over that of another way, by the other one, and milliseconds."""

READOUTS = {
    **_at_most(
        {
            "one probe": 1.01,
            "256 probes": 1.01,
            "SAE, top 32": 1.05,
            "lens, all layers, 1 of 32": 1.05,
            "lens, all layers, 8 of 32": 1.10,
        }
    ),
    "mean row": Goal(0.97, at_most=False),
}
"""Time per token over upstream's; of the mean row the throughput of prompts."""

STEERED_PROMPTS = Goal(0.95, at_most=False)
"""Throughput of prompts with an operation at every layer, over upstream's."""

DATASET = Goal(0.95, at_most=False)
"""Throughput of `vllm capture` over that of plain generation of the same prompts."""

STEERING_STEPS = {
    "idle": 1.01,
    "one": 1.015,
    "all": 1.06,
    "one clamps at all layers": 1.02,
    "one projects at all layers": 1.02,
    "one norm-matches at all layers": 1.02,
    "one replaces at all layers": 1.02,
    "all project at one layer": 1.02,
    "all project at all layers": 1.06,
    "all project at all points, 16 configs": 1.15,
    "all norm-match at one layer": 1.02,
}
"""CPU time of a decode step over that of an engine without steering, at most."""
