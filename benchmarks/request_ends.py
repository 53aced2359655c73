# SPDX-License-Identifier: Apache-2.0
"""Claim: when captured requests end together, a key of theirs costs few µs of Python.

    python benchmarks/request_ends.py [--requests 32] [--layers 32] [--rounds 7]

A request that is captured at all layers has a key `(request, layer, hook)` for each.
Many requests that end together delay others, because the threads that deliver their
rows share the interpreter with the engine's thread. This runs that path without a
model: requests with a prompt of 16 tokens generate 128, and `inline` returns the rows
of all positions. Results pass a socket and rows shared memory, as between an engine
core and its front end, which are threads of one process here. Rows are narrow, so that
copying them takes little of the time.

Figures are microseconds of CPU time per key, as the median and range over the rounds:
of the dispatch thread and the consumer's thread from the end of the requests on, of the
front end's thread that receives results, of the caller that takes them, and of all of
these; besides, what the two threads of the worker take while the requests run, and what
all threads but the engine's take per key of a step whose rows are streamed.
"""

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for `benchmarks`

from benchmarks.harness import reports  # noqa: E402
from benchmarks.harness.worker_alone import WorkerAlone, thread_seconds  # noqa: E402
from vllm.v1.capture.frontend.tracking import Sample  # noqa: E402
from vllm.v1.capture.plan import OPEN_END  # noqa: E402
from vllm.v1.capture.results import RowsByTap  # noqa: E402

WORK = ROOT / "build" / "benchmarks"
WIDTH, PROMPT, GENERATED = 64, 16, 128
CONSUMER = "inline"


class Ends:
    """Rounds of requests that start and end together."""

    def __init__(self, requests: int, layers: int) -> None:
        """Start a worker for models of this many layers."""
        self.worker = WorkerAlone(
            CONSUMER, layers, WIDTH, torch.device("cpu"), by_socket=True
        )
        self._taps = [(layer, "post_block") for layer in range(layers)]
        self._requests, self._begun = requests, 0
        threads = {
            "dispatch": self.worker.dispatcher_thread,
            "consumer": self.worker.consumer_thread,
            "receiver": self.worker.inbox_thread,
        }
        self._streaming = partial(thread_seconds, self.worker.streaming_thread)
        self._clocks: dict[str, Callable[[], float]] = {
            name: partial(thread_seconds, one) for name, one in threads.items()
        }

    def _generate(self, streamed: bool) -> list[str]:
        """Start requests, and run all steps."""
        ids = [f"r{self._begun + number}" for number in range(self._requests)]
        self._begun += self._requests
        self.worker.open(ids, PROMPT, self._taps, (0, OPEN_END), streamed)
        self.worker.step(ids, 0, PROMPT)
        for position in range(PROMPT, PROMPT + GENERATED - 1):
            self.worker.step(ids, position, 1)
            if streamed:
                time.sleep(0.001)  # As if the GPU computed; lets other threads run.
        return ids

    def stream(self) -> float:
        """One round with streamed rows; CPU time in microseconds per key and step."""
        before = sum(self._now().values()) + self._streaming()
        ids = self._generate(streamed=True)
        self.worker.end(ids, GENERATED)
        self.worker.answers(len(ids))
        self._rest()
        seconds = sum(self._now().values()) + self._streaming() - before
        return seconds / (len(ids) * len(self._taps) * GENERATED) * 1e6

    def run(self) -> dict[str, float]:
        """One round; CPU time in microseconds per key."""
        started = self._now()
        ids = self._generate(streamed=False)
        self._rest()
        before = self._now()
        self.worker.end(ids, GENERATED)
        messages = self.worker.answers(len(ids))
        begin = time.thread_time()
        results = [message.result() for message in messages]
        received = time.thread_time() - begin
        begin = time.thread_time()
        merged = [merge(result) for result in results]
        caller = time.thread_time() - begin
        after = self._now()
        self._check(merged)
        found = {name: after[name] - before[name] for name in self._clocks}
        found["receiver"] += received  # It makes these objects too.
        found["caller"] = caller
        found["all"] = sum(found.values())
        running = ("dispatch", "consumer")
        found["while running"] = sum(before[name] - started[name] for name in running)
        keys = len(ids) * len(self._taps)
        return {name: seconds / keys * 1e6 for name, seconds in found.items()}

    def _rest(self) -> None:
        """Wait until the threads have done what does not wait for the requests' end."""
        spent, before = sum(self._now().values()), 0.0
        while spent - before > 0.001:
            time.sleep(0.05)
            spent, before = sum(self._now().values()), spent

    def _now(self) -> dict[str, float]:
        return {name: clock() for name, clock in self._clocks.items()}

    def _check(self, merged: list[Any]) -> None:
        for result in merged:
            rows = result.payload
            assert isinstance(rows, RowsByTap), result
            assert list(rows) == self._taps, list(rows)
            shape = PROMPT + GENERATED - 1, WIDTH
            assert all(one.shape == shape for one in rows.values())


def merge(result: Any) -> Any:
    """What the front end gives the caller: the results of all stages."""
    sample = Sample((CONSUMER,), 1, {CONSUMER: {0: result}})
    return sample.merged("parent")[CONSUMER]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=WORK / "request_ends.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    head, load = reports.begun(), os.getloadavg()
    ends = Ends(options.requests, options.layers)
    for _ in range(2):  # They allocate memory.
        ends.run()
    ends.stream()
    gc.collect()
    gc.freeze()  # As an engine does after its start.
    rounds = [
        ends.run() | {"streamed step": ends.stream()} for _ in range(options.rounds)
    ]
    ends.worker.close()
    keys = options.requests * options.layers
    report: dict[str, Any] = {
        **head,
        "machine": reports.machine(load),
        "requests": options.requests,
        "layers": options.layers,
        "rounds": options.rounds,
        "cases": {
            name: {"us_per_key": one} for name, one in reports.summaries(rounds).items()
        },
    }
    for name, found in report["cases"].items():
        one = found["us_per_key"]
        print(
            f"{name:14s} {one['median']:6.2f} us per key ({one['smallest']:.2f} to "
            f"{one['largest']:.2f}), {one['median'] * keys / 1e3:6.1f} ms in all"
        )
    reports.write(report, options.out)


if __name__ == "__main__":
    main()
