# SPDX-License-Identifier: Apache-2.0
"""Claim: a captured step costs the engine's thread little, at many layers as at one.

    python benchmarks/host_cost.py [--requests 32] [--steps 192] [--rounds 5]

On a GPU a step may be limited by its work on the CPU. This runs capture's part of that
work without a model: requests decode one token per step, rows of a 1B-class model (16
layers of width 2048, bfloat16) are captured at `post_block`, and the consumer
`host_memory` receives them. The requests either start and end together, or come and go
as on a server: every few steps one of them ends, two steps later the front end reports
its end, and another one starts. Kept around tokens, where none fires, rows are held on
the device and dropped there (`vllm/v1/capture/dispatch/held_rows.py`).

Figures are microseconds per step, as the median and range over the rounds, of CPU time:
of the engine thread, which delays the step; of all threads, which run concurrently but
share the interpreter; of the dispatch thread, with the part of it that copies rows and
so releases the interpreter lock; and of the consumer's thread.
"""

import argparse
import gc
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for `benchmarks`

from benchmarks.harness import reports  # noqa: E402
from benchmarks.harness.host_memory import NAME as HOST_MEMORY  # noqa: E402
from benchmarks.harness.host_memory import plug_in  # noqa: E402
from benchmarks.harness.worker_alone import WorkerAlone, thread_seconds, view_of  # noqa: E402
from vllm.v1.capture.memory import buffer_pool  # noqa: E402
from vllm.v1.residual.spans import OPEN_END  # noqa: E402
from vllm.v1.residual.tap import Tap  # noqa: E402

WORK = ROOT / "build" / "benchmarks"
WIDTH, LAYERS, PROMPT = 2048, 16, 20
ANSWER_STEPS = 2
"""Steps between a request's last one and the front end's report of its end."""
LAYERS_OF = {
    "nothing": range(0),
    "one layer": range(8, 9),
    "all layers": range(LAYERS),
}
WINDOW = 8
"""With `keep_when`, rows of so many tokens before and after one that fires are kept."""


class Traffic(Protocol):
    """A pattern of requests in one worker."""

    worker: WorkerAlone
    steps: int
    """Steps per round."""

    def run(self) -> float:
        """Run a round; the seconds that it took on the engine's thread."""


class Together:
    """Requests that start and end with the round."""

    def __init__(
        self, layers: range, requests: int, steps: int, window: int = 0
    ) -> None:
        """Requests that generate this many tokens, captured at `layers`."""
        self.worker = worker()
        self._taps = taps_of(layers)
        self._requests, self.steps, self._window = requests, steps, window
        self._begun = 0

    def run(self) -> float:
        """Run a round; the seconds that it took on the engine's thread."""
        begin = time.thread_time()
        ids = [f"r{self._begun + number}" for number in range(self._requests)]
        self._begun += self._requests
        self.worker.open(ids, PROMPT, self._taps, (PROMPT, OPEN_END), self._window)
        seconds = time.thread_time() - begin
        for step in range(self.steps):
            view = view_of(ids, PROMPT + step, 1)
            begin = time.thread_time()
            self.worker.run(view)
            seconds += time.thread_time() - begin
            time.sleep(0.001)  # As if the GPU computed; lets other threads run.
        begin = time.thread_time()
        self.worker.end(ids, self.steps)
        seconds += time.thread_time() - begin
        self.worker.answers(self._requests)
        return seconds


class ComingAndGoing:
    """Requests of which one ends and another one starts every few steps."""

    def __init__(self, layers: range, requests: int, steps: int) -> None:
        """Requests that generate this many tokens, captured at `layers`."""
        self.worker = worker()
        self._taps = taps_of(layers)
        self._tokens = self.steps = steps
        self._running: dict[str, int] = {}
        """Computed tokens by request, in order of arrival."""
        self._gone: list[tuple[int, str]] = []
        """The step in which the end of each finished request is reported."""
        self._step = self._said = 0
        for number in range(requests):
            self._open()
            while self._step < number * steps // requests:
                self._one_step()
        while not self._said:  # From then on, each end is followed by a start.
            self._one_step()
        self.worker.answers(1)

    def run(self) -> float:
        """Run a round; the seconds that it took on the engine's thread."""
        self._said = 0
        seconds = sum(self._one_step() for _ in range(self.steps))
        self.worker.answers(self._said)
        return seconds

    def _one_step(self) -> float:
        begin = time.thread_time()
        if self._gone and self._gone[0][0] == self._step:
            self.worker.end([self._gone.pop(0)[1]], self._tokens)
            self._said += 1
            self._open()
        seconds = time.thread_time() - begin
        counts = [1 if computed else PROMPT for computed in self._running.values()]
        starts = list(self._running.values())
        view = view_of(list(self._running), starts, counts)
        begin = time.thread_time()
        self.worker.run(view)
        seconds += time.thread_time() - begin
        for name, count in zip(list(self._running), counts, strict=True):
            self._running[name] += count
            if self._running[name] == PROMPT + self._tokens - 1:
                del self._running[name]
                self._gone.append((self._step + ANSWER_STEPS, name))
        self._step += 1
        time.sleep(0.001)
        return seconds

    def _open(self) -> None:
        name = f"r{self._step}"
        self.worker.open([name], PROMPT, self._taps, (PROMPT, OPEN_END))
        self._running[name] = 0


def worker() -> WorkerAlone:
    """A worker with the consumer `host_memory`, as in `serving.py`."""
    *folders, _ = plug_in(WORK / "plugin").split(":")
    sys.path[:] = [*folders, *(path for path in sys.path if path not in folders)]
    return WorkerAlone(HOST_MEMORY, LAYERS, WIDTH, torch.device("cpu"))


def taps_of(layers: range) -> list[Tap]:
    """`post_block` of each of these layers."""
    return [(layer, "post_block") for layer in layers]


class CopyClock:
    """CPU seconds that each thread has spent copying rows."""

    def __init__(self) -> None:
        self.seconds: defaultdict[int | None, float] = defaultdict(float)
        for name in ("_copy_by_torch", "_gather"):
            setattr(buffer_pool, name, partial(self._timed, getattr(buffer_pool, name)))

    def _timed(self, copy: Callable[..., None], *what: Any) -> None:
        begin = time.thread_time()
        copy(*what)
        self.seconds[threading.get_ident()] += time.thread_time() - begin


def measure(traffic: Traffic, copies: CopyClock) -> dict[str, float]:
    """Microseconds per step over one round."""
    alone = traffic.worker
    threads = alone.dispatcher_thread, alone.consumer_thread
    clocks: list[Callable[[], float]] = [time.process_time]
    clocks += [partial(thread_seconds, one) for one in threads]
    begin = [clock() for clock in clocks]
    copied = copies.seconds[threads[0]]
    engine = traffic.run()
    every, dispatcher, consumer = (
        now() - then for now, then in zip(clocks, begin, strict=True)
    )
    found = {
        "engine_thread_us": engine,
        "all_threads_us": every,
        "dispatcher_us": dispatcher,
        "dispatcher_copies_us": copies.seconds[threads[0]] - copied,
        "consumer_us": consumer,
    }
    return {clock: seconds / traffic.steps * 1e6 for clock, seconds in found.items()}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--steps", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=WORK / "host_cost.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    head, load = reports.begun(), os.getloadavg()
    size = options.requests, options.steps
    cases: dict[str, Traffic] = {}
    for name, layers in LAYERS_OF.items():
        cases[name] = Together(layers, *size)
        cases[f"{name}, coming and going"] = ComingAndGoing(layers, *size)
    cases["all layers, kept around tokens"] = Together(range(LAYERS), *size, WINDOW)
    gc.collect()
    gc.freeze()  # As an engine does after its start.
    copies = CopyClock()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for number in range(-1, options.rounds):  # the first one warms up
        for name, traffic in cases.items():
            cost = measure(traffic, copies)
            if number >= 0:
                found[name].append(cost)
    for traffic in cases.values():
        traffic.worker.close()
    report: dict[str, Any] = {
        **head,
        "machine": reports.machine(load),
        "requests": options.requests,
        "steps": options.steps,
        "consumer": HOST_MEMORY,
        "rounds": options.rounds,
        "cases": {name: reports.summaries(costs) for name, costs in found.items()},
    }
    for name, clocks in report["cases"].items():
        cells = [
            f"{clock} {one['median']:.0f} ({one['smallest']:.0f} to "
            f"{one['largest']:.0f})"
            for clock, one in clocks.items()
        ]
        print(f"{name:30s} " + "  ".join(cells))
    reports.write(report, options.out)


if __name__ == "__main__":
    main()
