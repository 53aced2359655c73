# SPDX-License-Identifier: Apache-2.0
"""Measures the stages between the device and a consumer one by one.

Part of `bandwidth.py`, run in its own process. Importing this needs the fork.
"""

import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.harness.host_memory import NAME
from benchmarks.harness.worker_alone import WorkerAlone
from vllm.v1.capture.plan import OPEN_END, Tap
from vllm.v1.capture.staging.ring import Segment, Staging

MIB = 1 << 20
SAMPLE_BYTES = 1 << 30
"""Approximate bytes that each sample moves."""
COPIES = (2, 32, 128)
"""Sizes of copies in MiB.

From a decode step of 32 requests with the 1B-class model to the most that a step
captures in the default staging memory.
"""
DECODING, FIRST = 32, 20
"""Concurrent requests, and the length of their prompts in tokens."""

Sample = Callable[[], float]
"""Moves rows and returns bytes per second."""


class Stages:
    """The stages for the rows of one model."""

    def __init__(
        self, layers: int, width: int, prompt: int, device: torch.device
    ) -> None:
        self._prompt = prompt
        self._row_bytes = width * torch.bfloat16.itemsize
        self._taps: list[Tap] = [(layer, "post_block") for layer in range(layers)]
        self._device, self._width = device, width
        consumer = f"{NAME}:keep=false"
        self._worker = WorkerAlone(consumer, layers, width, device)
        rows_at_once = self._worker.rows_per_step // layers
        self._chunk = max(1, min(rows_at_once, prompt, 8192))
        self._requests = 0

    def samples(self) -> dict[str, Sample]:
        """Samples by name of the stage."""
        found: dict[str, Sample] = {}
        # on other devices rows are on the host immediately
        if self._device.type == "cuda":
            rows = max(COPIES) * MIB // self._row_bytes
            staging = Staging(rows, self._width, torch.bfloat16, self._device)
            for mib in COPIES:
                name = f"device to pinned host, {mib} MiB at once"
                found[name] = partial(self._copy, staging, mib)
        loads = {"prompts": self._prompts, "decoded tokens": self._tokens}
        for name, load in loads.items():
            found[f"pinned host to consumer, {name}"] = partial(load, True)
        if self._device.type == "cuda":
            for name, load in loads.items():
                found[f"device to consumer, {name}"] = partial(load, False)
        return found

    def close(self) -> None:
        """Stop."""
        self._worker.close()

    def _copy(self, staging: Staging, mib: int) -> float:
        """Only the copies, each of which is waited for as by the dispatch thread."""
        segment = Segment(0, mib * MIB // self._row_bytes)
        count = max(1, SAMPLE_BYTES // (mib * MIB))
        begin = time.perf_counter()
        for _ in range(count):
            copied = staging.to_host([segment])
            assert copied is not None, "nothing was copied"
            copied.synchronize()
        return count * mib * MIB / (time.perf_counter() - begin)

    def _prompts(self, without_copy: bool) -> float:
        """Prompts captured at all positions, in steps of the maximal size."""
        self._worker.leave_out_the_copy(without_copy)
        rows = self._prompt * len(self._taps)
        count = max(1, SAMPLE_BYTES // (rows * self._row_bytes))
        begin = time.perf_counter()
        for _ in range(count):
            ids = self._open(1, self._prompt, (0, self._prompt))
            for done in range(0, self._prompt, self._chunk):
                tokens = min(self._chunk, self._prompt - done)
                self._worker.step(ids, done, tokens)
            self._worker.end(ids, 1)
        return self._arrived(count, count * rows, begin)

    def _tokens(self, without_copy: bool) -> float:
        """Decoding requests captured at all generated tokens."""
        self._worker.leave_out_the_copy(without_copy)
        rows = DECODING * len(self._taps)  # of a step
        steps = min(512, max(1, SAMPLE_BYTES // (rows * self._row_bytes)))
        begin = time.perf_counter()
        ids = self._open(DECODING, FIRST, (FIRST, OPEN_END))
        for step in range(steps):
            self._worker.step(ids, FIRST + step, 1)
        # The last generated token is never fed to the model and has no row.
        self._worker.end(ids, steps + 1)
        return self._arrived(DECODING, steps * rows, begin)

    def _open(self, count: int, prompt: int, positions: tuple[int, int]) -> list[str]:
        ids = [f"request {self._requests + number}" for number in range(count)]
        self._requests += count
        self._worker.open(ids, prompt, self._taps, positions)
        return ids

    def _arrived(self, requests: int, rows: int, begin: float) -> float:
        answers = self._worker.answers(requests)
        seconds = time.perf_counter() - begin
        counted = sum(sum(answer.payload) for answer in answers)
        if counted != rows:
            raise RuntimeError(f"{counted} of {rows} rows reached the consumer")
        return rows * self._row_bytes / seconds


def measure(
    layers: int, width: int, prompt: int, device: str, rounds: int
) -> dict[str, list[float]]:
    """Bytes per second of each stage in each round, after a warm-up round."""
    place = torch.device("cuda:0" if device == "cuda" else device)
    stages = Stages(layers, width, prompt, place)
    samples = stages.samples()
    found: dict[str, list[float]] = {name: [] for name in samples}
    for number in range(-1, rounds):
        for name, sample in samples.items():
            speed = sample()
            if number >= 0:
                found[name].append(speed)
    stages.close()
    return found
