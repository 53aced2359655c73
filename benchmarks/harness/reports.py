# SPDX-License-Identifier: Apache-2.0
"""Common parts of reports: machine, command, statistics and output."""

import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from math import comb
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30


def begun() -> dict[str, Any]:
    """Date and command, for the head of a report."""
    path = Path(sys.argv[0]).resolve()
    script = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", str(script), *sys.argv[1:]]),
    }


def save(report: dict[str, Any], path: Path) -> None:
    """Write a report, which may be incomplete, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def write(report: dict[str, Any], path: Path) -> None:
    """Write a whole report as JSON, and say where."""
    save(report, path)
    print(f"Written to {path}")


def machine(load_before: tuple[float, float, float]) -> dict[str, Any]:
    """The CPU and its load."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_average_before": load_before,
        "load_average_after": os.getloadavg(),
    }


def ask_gpu(field: str) -> str | None:
    """A field of `nvidia-smi` for the first visible GPU; None if there is none."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    if seen := os.environ.get("CUDA_VISIBLE_DEVICES"):
        # Numbers or names, with commas, as the driver's tool takes them.
        command += ["--id", seen]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = found.stdout.splitlines()
    return lines[0].strip() if found.returncode == 0 and lines else None


def gpu_memory_gib() -> float | None:
    """GPU memory in GiB that all processes use."""
    used = ask_gpu("memory.used")  # in MiB
    return None if used is None or not used.isdigit() else int(used) / 1024


def engine_facts(log: str) -> dict[str, float]:
    """Facts about an engine's start from its log: graphs, weights, KV cache size."""
    patterns = {
        "graph_seconds": r"Graph capturing finished in (\d+) secs",
        "graph_gib": r"Graph capturing finished in \d+ secs, took ([\d.]+) GiB",
        "weights_gib": r"Model loading took ([\d.]+) GiB",
        "kv_cache_tokens": r"KV cache size: ([\d,]+) tokens",
    }
    found = {name: re.findall(pattern, log) for name, pattern in patterns.items()}
    # The last match: earlier ones are from profiling.
    return {
        name: float(values[-1].replace(",", ""))
        for name, values in found.items()
        if values
    }


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median, range, and the 95 % confidence interval of the median.

    The interval is distribution-free: its bounds are order statistics. With fewer than
    six values it is the whole range, which has less than 95 % confidence.
    """
    ordered = sorted(values)
    count = len(ordered)
    skip, below = 0, 0.5**count
    while 2 * (below + comb(count, skip + 1) * 0.5**count) <= 0.05:
        skip += 1
        below += comb(count, skip) * 0.5**count
    return {
        "median": statistics.median(ordered),
        "smallest": ordered[0],
        "largest": ordered[-1],
        "interval": [ordered[skip], ordered[-1 - skip]],
    }


def summaries(rounds: Sequence[Mapping[str, float]]) -> dict[str, dict[str, Any]]:
    """The `summary` of each figure over rounds that have the same figures."""
    return {name: summary([each[name] for each in rounds]) for name in rounds[0]}


def print_starts(starts: Mapping[str, Mapping[str, float]]) -> None:
    """Print the start-up figures of each side of a comparison."""
    for side, found in starts.items():
        figures = ", ".join(f"{name} {value:.2f}" for name, value in found.items())
        print(f"start of {side}: {figures}")
