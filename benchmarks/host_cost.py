# SPDX-License-Identifier: Apache-2.0
"""Claim: a captured step costs the engine's thread little, at many layers as at one.

    python benchmarks/host_cost.py [--requests 32] [--steps 256] [--rounds 5]

On a GPU a step is limited by what the CPU does for it. This runs what capture does
there, without a model: requests decode one token a step, rows of a 1B-class model (16
layers of width 2048, bfloat16) are read behind the block, and the `logging` consumer
gets them. Figures are microseconds a step, the median over the rounds and their range:
the CPU time of the engine's thread, which delays the step; and of all threads, which
run beside it but share its interpreter.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for `benchmarks`

from benchmarks import reports  # noqa: E402
from benchmarks.worker_alone import WorkerAlone  # noqa: E402
from vllm.v1.capture.plan import OPEN_END  # noqa: E402

WORK = ROOT / "build" / "benchmarks"
WIDTH, LAYERS, PROMPT = 2048, 16, 20
CASES = {
    "nothing": range(0),
    "one layer": range(8, 9),
    "all layers": range(LAYERS),
}
CLOCKS = ("engine_thread_us", "all_threads_us")


def decode(
    worker: WorkerAlone, name: str, layers: range, requests: int, steps: int
) -> dict[str, float]:
    """Microseconds a step on the engine's thread, and on all threads."""
    ids = [f"{name}{number}" for number in range(requests)]
    taps = [(layer, "post_block") for layer in layers]
    worker.open(ids, PROMPT, taps, (PROMPT, OPEN_END))
    every, engine = time.process_time(), 0.0
    for step in range(steps):
        begin = time.thread_time()
        worker.step(ids, PROMPT + step, 1)
        engine += time.thread_time() - begin
        time.sleep(0.001)  # The GPU computes, and other threads have their turn.
    worker.end(ids, steps)
    worker.answers(requests)
    every = time.process_time() - every
    return dict(zip(CLOCKS, (engine / steps * 1e6, every / steps * 1e6), strict=True))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=WORK / "host_cost.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    head, load = reports.begun(), os.getloadavg()
    worker = WorkerAlone("logging", LAYERS, WIDTH, torch.device("cpu"))
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
    for number in range(-1, options.rounds):  # the first one warms up
        for name, layers in CASES.items():
            ids = f"{name}, {number}, "
            cost = decode(worker, ids, layers, options.requests, options.steps)
            if number >= 0:
                found[name].append(cost)
    worker.close()
    report: dict[str, Any] = {
        **head,
        "machine": reports.machine(load),
        "requests": options.requests,
        "steps": options.steps,
        "rounds": options.rounds,
        "cases": {
            name: {c: reports.summary([each[c] for each in costs]) for c in CLOCKS}
            for name, costs in found.items()
        },
    }
    for name, clocks in report["cases"].items():
        cells = [
            f"{clock} {one['median']:.0f} ({one['smallest']:.0f} to "
            f"{one['largest']:.0f})"
            for clock, one in clocks.items()
        ]
        print(f"{name:12s} " + "  ".join(cells))
    reports.write(report, options.out)


if __name__ == "__main__":
    main()
