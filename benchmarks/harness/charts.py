# SPDX-License-Identifier: Apache-2.0
"""The contents of a report's plot: rows of figures with goals, by script."""

import re
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import goals
from benchmarks.harness.goals import Goal

Report = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Mark:
    """A figure with its range."""

    median: float
    low: float
    high: float
    interval: tuple[float, float] | None = None
    """The 95 % confidence interval of the median."""
    label: str = ""
    """The mark's label, if a row has several marks."""


@dataclass(frozen=True, slots=True)
class Row:
    """One case."""

    label: str
    marks: tuple[Mark, ...]
    goal: Goal | None = None


@dataclass(frozen=True, slots=True)
class Panel:
    """Rows on one axis."""

    unit: str
    rows: tuple[Row, ...]
    is_ratio: bool = True

    def text_of(self, row: Row) -> str:
        """A row's figures as text: median and range, or the range of medians."""

        def text(value: float) -> str:
            return f"{value:.3f}" if self.is_ratio else f"{value:.1f}"

        if len(row.marks) > 1:
            medians = [mark.median for mark in row.marks]
            return f"{text(min(medians))} to {text(max(medians))}"
        (mark,) = row.marks
        if mark.low == mark.high:
            return text(mark.median)
        return f"{text(mark.median)} ({text(mark.low)} to {text(mark.high)})"


@dataclass(frozen=True, slots=True)
class Chart:
    """All panels of one report."""

    title: str
    panels: tuple[Panel, ...]


def chart_of(report: Report) -> Chart:
    """The chart of a report; its command tells which script wrote it.

    Raises:
        ValueError: it is not a report of these scripts.
    """
    found = re.search(r"(\w+)\.py\b", str(report.get("command", "")))
    if found is None or found[1] not in _CHARTS:
        raise ValueError(
            f"nothing is drawn of what {report.get('command')!r} reports; there are "
            f"plots for {sorted(_CHARTS)}"
        )
    title, make = _CHARTS[found[1]]
    place = report.get("device") or report.get("gpu")
    place = place or report.get("machine", {}).get("cpu", "")
    date = str(report.get("date", ""))[:10]
    panels = tuple(panel for panel in make(report) if panel.rows)
    return Chart(f"{title}\n{place}, {date}", panels)


def mark(summary: Mapping[str, Any], scale: float = 1.0) -> Mark:
    """A mark from a result of `reports.summary`."""
    low, high = summary["interval"]
    return Mark(
        summary["median"] * scale,
        summary["smallest"] * scale,
        summary["largest"] * scale,
        (low * scale, high * scale),
    )


def spread(values: list[float]) -> Mark:
    """A mark from all measured values."""
    return Mark(statistics.median(values), min(values), max(values))


def _overhead(report: Report) -> list[Panel]:
    rows = [
        Row("throughput", (mark(report["ratio"]),), Goal(1.0, at_most=False)),
        Row("by CPU time", (mark(report["cpu_ratio"]),), Goal(1.0, at_most=False)),
        Row("upstream / upstream (noise)", (mark(report["control"]),)),
    ]
    return [Panel("fork / upstream, both features off", tuple(rows))]


def _decode_step(report: Report) -> list[Panel]:
    aims = goals.DECODE_STEP.get(report["model"].partition(":")[0], {})
    variants = dict(report["variants"])
    noise = "upstream"
    # Reports from before upstream was measured in the same run.
    if "upstream again" in variants:
        del variants["upstream"]
        noise = "upstream again"
    several = len(variants) > 2  # more than upstream and one
    rows = []
    for name, variant in variants.items():
        # Relative to the fork's own plain steps if the run has no upstream.
        measured = variant if "ratio" in variant else variant["over_own_plain"]
        ranges = measured.get("range", {})
        for case, by_batch in measured["ratio"].items():
            label = case if case != "plain" else "nobody captures or steers"
            if name == noise:
                label = "upstream / upstream (noise)"
            elif several:
                label = f"{name}: {label}"
            marks = []
            for batch, ratio in by_batch.items():
                low, high = ranges.get(case, {}).get(batch, (ratio, ratio))
                marks.append(Mark(ratio, low, high, label=f"batch {batch}"))
            goal = aims.get(case) if name != noise else None
            rows.append(Row(label, tuple(marks), goal))
    alone = all("ratio" not in variant for variant in variants.values())
    base = "the fork's own plain step" if alone else "upstream"
    return [Panel(f"GPU time of a decode step / {base}", tuple(rows))]


def _serving(report: Report) -> list[Panel]:
    panels = []
    units = {
        "mean_tpot_ms": "time per output token / upstream",
        "mean_ttft_ms": "time to first token / upstream",
        "total_token_throughput": "throughput / upstream",
    }
    for figure, unit in units.items():
        rows = []
        for case in report["rounds"][0]:
            if "prompts" in case and figure == "mean_tpot_ms":
                continue
            both = [each[case] for each in report["rounds"]]
            ratios = [each["fork"][figure] / each["upstream"][figure] for each in both]
            rows.append(Row(case, (spread(ratios),), goals.SERVING[figure].get(case)))
        panels.append(Panel(unit, tuple(rows)))
    return [*panels, _start(report)]


def _start(report: Report) -> Panel:
    """Start and memory, the fork's over upstream's."""
    labels = {
        "seconds": "seconds until ready",
        "graph_gib": "memory of graphs",
        "peak_gpu_gib": "peak of all tensors' memory",
        "kv_cache_tokens": "room for tokens in the KV cache",
    }
    theirs, ours = (report["start"].get(side, {}) for side in ("upstream", "fork"))
    aims = goals.SERVING["start"]
    rows = [
        Row(label, (spread([ours[name] / theirs[name]]),), aims.get(name))
        for name, label in labels.items()
        if theirs.get(name) and ours.get(name)
    ]
    return Panel("start and memory / upstream", tuple(rows))


def _storage(report: Report) -> list[Panel]:
    rows = [
        Row(
            name,
            (spread([one["ratio"] for one in rounds]),),
            goals.STORAGE[name.partition(",")[0]],
        )
        for name, rounds in report["ways"].items()
    ]
    return [Panel("throughput / plain sequential writer", tuple(rows))]


def _readouts(report: Report) -> list[Panel]:
    labels = {
        "no readouts": "no request reads out",
        "one probe": "one probe, every request",
        "256 probes": "256 probes, every request",
        "SAE, top 32": "SAE of 65,536 features, top 32, every request",
        "lens, all layers, 1 of 32": "lens of all layers, one request of 32",
        "lens, all layers, 8 of 32": "lens of all layers, 8 requests of 32",
        "mean row": "mean row of all layers, prompts of 4,096 tokens",
    }
    found = report["cases"]
    rows = {
        name: Row(label, (mark(found[name]),), goals.READOUTS.get(name))
        for name, label in labels.items()
        if "median" in found.get(name, {})
    }
    prompts = [rows.pop("mean row")] if "mean row" in rows else []
    base = "upstream" if report["upstream"] else "the same without readouts"
    return [
        Panel(f"time per token of 32 requests / {base}", tuple(rows.values())),
        Panel(f"throughput of prompts / {base}", tuple(prompts)),
    ]


def _ranks(report: Report) -> list[Panel]:
    return [
        Panel(
            f"throughput of 32 requests over the first side's, {side}",
            tuple(Row(name, (mark(found),)) for name, found in cases.items()),
        )
        for side, cases in report["cases"].items()
    ]


def _patching(report: Report) -> list[Panel]:
    rows = [
        Row(name, (spread(side.get("all", [side["seconds"]])),))
        for name, side in report["sides"].items()
    ]
    return [Panel("seconds of all cells", tuple(rows), is_ratio=False)]


def _steered_prompts(report: Report) -> list[Panel]:
    rows = [
        Row(name, (mark(found),), goals.STEERED_PROMPTS)
        for name, found in report["cases"].items()
    ]
    base = "upstream" if report["upstream"] else "the same without interventions"
    return [Panel(f"throughput of prompts / {base}", tuple(rows))]


def _dataset(report: Report) -> list[Panel]:
    sides = {
        "generate": "plain generation",
        "generate_kept": "the same with the command's allocator settings",
    }
    panels = []
    for side, label in sides.items():
        if f"over_{side}" not in report:
            continue
        rows = []
        for clock, name in (("seconds", "on the clock"), ("cpu", "by CPU time")):
            ratios = [
                turn[f"{side}_{clock}"] / turn[f"capture_{clock}"]
                for turn in report["turns"]
            ]
            rows.append(Row(name, (spread(ratios),), goals.DATASET))
        panels.append(Panel(f"throughput of vllm capture / {label}", tuple(rows)))
    return panels


def _steering_steps(report: Report) -> list[Panel]:
    if "within" in report:
        unit = "CPU time of a decode step / nobody is steered, in the same process"
        rows = [
            Row(
                _STEERED.get(mode, mode),
                (mark(found),),
                _aim(goals.STEERING_STEPS, mode),
            )
            for mode, found in report["within"].items()
        ]
        return [Panel(unit, tuple(rows))]
    starts = [
        {mode: statistics.median(ratios) for mode, ratios in start.items()}
        for start in report["starts"].values()
    ]
    of_all, of_operations = [], []
    for mode, cost in report["cost"].items():
        aim = _aim(goals.STEERING_STEPS, mode)
        if mode in _STEERED:
            found = [start[mode] for start in starts]
            mark_of_all = Mark(cost, min(found), max(found))
            of_all.append(Row(_STEERED[mode], (mark_of_all,), aim))
        else:  # Over steps of the same process, whose speed differs from the other.
            found = [start[mode] / start["idle"] for start in starts]
            over_idle = Mark(statistics.geometric_mean(found), min(found), max(found))
            of_operations.append(Row(mode, (over_idle,), aim))
    unit = "CPU time of a decode step / without steering; the range is of two starts"
    idle = "CPU time of a decode step / nobody is steered; the range is of two starts"
    panels = Panel(unit, tuple(of_all)), Panel(idle, tuple(of_operations))
    return [panel for panel in panels if panel.rows]


def _host_cost(report: Report) -> list[Panel]:
    clocks = {
        "engine_thread_us": "the engine's thread",
        "all_threads_us": "all threads",
        "dispatcher_us": "the dispatcher's thread",
    }
    return [
        Panel(
            f"µs a step, {label}",
            tuple(Row(n, (mark(c[clock]),)) for n, c in report["cases"].items()),
            is_ratio=False,
        )
        for clock, label in clocks.items()
    ]


def _aim(aims: Mapping[str, float], mode: str) -> Goal | None:
    return Goal(aims[mode]) if mode in aims else None


_STEERED = {
    "idle": "nobody is steered",
    "one": "one layer",
    "all": "all layers and hook points",
}
_LOADS = {
    "large": "1,024-token prompts",
    "small": "128-token prompts",
    "one": "one 512-token prompt",
    "generated": "128 generated tokens",
}
_WAYS = {
    "caller": "to the caller",
    "generated": "to the caller",
    "states": "by Transformers",
    "connector": "by upstream's connector",
    "ipc": "Arrow IPC",
    "parquet": "Parquet",
}
_BASES = {
    "of plain": "throughput / upstream's without rows",
    "of connector": "throughput / upstream's connector",
    "of disk": "throughput / one plain writer",
}


def _delivery(report: Report) -> list[Panel]:
    summary = report.get("summary", {})

    def label(name: str) -> str:
        load, _, way = name.partition(" ")
        return f"{_LOADS[load]}, {_WAYS.get(way, way)}"

    panels = []
    for base, unit in _BASES.items():
        aims = goals.DELIVERY[base]
        rows = [
            Row(label(name), (mark(found[base]),), aims.get(name))
            for name, found in summary.items()
            if base in found and not name.endswith((" disk", " plain"))
            if name in aims or (base == "of plain" and name.startswith("large "))
        ]
        panels.append(Panel(unit, tuple(rows)))
    times = {
        name: found["seconds"]
        for name, found in summary.items()
        if name.startswith("one ")
    }
    times = {label(name): (name, found) for name, found in times.items()}
    times |= {
        f"HTTP, {name}": (name, one) for name, one in report.get("http", {}).items()
    }
    rows = [
        Row(text, (mark(found, 1e3),), goals.DELIVERY["milliseconds"].get(name))
        for text, (name, found) in times.items()
    ]
    panels.append(Panel("milliseconds", tuple(rows), is_ratio=False))
    return panels


def _keep_when(report: Report) -> list[Panel]:
    words = {
        "read": "readout alone",
        "request": "rows of requests that fire",
        "token": "rows around tokens that fire",
    }
    rows = [
        Row(words[mode], (spread([one["ratio"] for one in turns]),))
        for mode, turns in report["turns"].items()
    ]
    return [Panel("throughput over that of requests without readouts", tuple(rows))]


_CHARTS: dict[str, tuple[str, Callable[[Report], list[Panel]]]] = {
    "overhead": ("Throughput with both features off", _overhead),
    "decode_step": ("Decode step, by graph replay", _decode_step),
    "serving": ("Serving", _serving),
    "storage": ("Consumers that write files", _storage),
    "delivery": ("Rows to the caller, to files and over HTTP", _delivery),
    "ranks": ("Tokens generated over several GPUs", _ranks),
    "readouts": ("Readouts of an engine", _readouts),
    "patching": ("A patching sweep, and the same by hooks in Transformers", _patching),
    "keep_when": ("Rows of all layers, kept where a readout fires", _keep_when),
    "steered_prompts": (
        "Prompts of 4,096 tokens with an operation at every layer",
        _steered_prompts,
    ),
    "dataset": ("Prompts of 64 tokens to a data set of two layers", _dataset),
    "steering_steps": ("Steering, per decode step on a CPU", _steering_steps),
    "host_cost": ("Capture on the host, without a model", _host_cost),
}
