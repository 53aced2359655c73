# SPDX-License-Identifier: Apache-2.0
"""Claim: rows of vllm-activation-capture are written sooner if a GPU encodes them.

    python benchmarks/encoded_rows.py --out benchmarks/results/encoded_rows.md

A worker without a model writes prompts that are captured at all layers and positions,
with rows of random values in staging memory. Each mode is measured twice: encoded on
the device before the rows are copied to the host, and copied whole and encoded there.
Both take turns. Elapsed time is that from the first step to the last file; CPU time is
the process's.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from time import perf_counter, process_time

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for `benchmarks`

from benchmarks.harness import reports  # noqa: E402
from benchmarks.harness.worker_alone import WorkerAlone  # noqa: E402
from vllm.v1.capture.worker import offload  # noqa: E402

MODES = (("rp8", True), ("rp8", False), ("topk8", False), ("full8", False))
"""Mode, and whether a scale is for a dimension."""
HEAD = """<!-- SPDX-License-Identifier: Apache-2.0 -->
# Rows encoded on the device

`{command}`, {date}; {device}, {cores} cores; {prompts} prompts of {length} tokens,
{layers} layers, rows of {width} bfloat16 values; medians of {rounds} rounds. Rows per
second until the files are written, and CPU time per row.

| mode | scale for a | bytes copied per row | rows/s | CPU µs | whole: bytes | rows/s \
| CPU µs | times as fast |
|---|---|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Load:
    """What is captured in a round."""

    device: torch.device
    layers: int
    width: int
    prompts: int
    length: int

    @property
    def rows(self) -> int:
        """Rows of a round."""
        return self.layers * self.prompts * self.length


class Side:
    """A worker whose rows are encoded on the device, or on the host."""

    def __init__(
        self, load: Load, folder: str, mode: str, per_dim: bool, on_device: bool
    ) -> None:
        self._load, self._names = load, count()
        params = {"root": folder, "mode": mode, "per_dim_scale": per_dim}
        consumer = json.dumps({"name": "activation_capture", "params": params})
        usual, offload.crosses_to_host = (
            offload.crosses_to_host,
            lambda device: on_device,
        )
        self.worker = WorkerAlone(consumer, load.layers, load.width, load.device)
        offload.crosses_to_host = usual
        staging = self.worker._worker._staging
        staging.rows.normal_()
        self.row_bytes = staging.host_rows[:1].nbytes

    def round(self) -> tuple[float, float]:
        """Seconds and CPU seconds until all files are written."""
        load, worker = self._load, self.worker
        taps = [(layer, "post_block") for layer in range(load.layers)]
        at_once = min(8192, max(worker.rows_per_step // load.layers, 1))
        began, cpu = perf_counter(), process_time()
        for _ in range(load.prompts):
            ids = [f"prompt-{next(self._names)}"]
            worker.open(ids, load.length, taps, (0, load.length))
            for done in range(0, load.length, at_once):
                worker.step(ids, done, min(at_once, load.length - done))
            worker.end(ids, 1)
        worker.answers(load.prompts)
        return perf_counter() - began, process_time() - cpu


def line(load: Load, mode: str, per_dim: bool, rounds: int) -> str:
    """A row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        sides = [
            Side(load, f"{folder}/{on_device}", mode, per_dim, on_device)
            for on_device in (True, False)
        ]
        taken: list[list[tuple[float, float]]] = [[], []]
        for turn in range(rounds + 1):
            for number in (0, 1) if turn % 2 else (1, 0):
                cost = sides[number].round()
                if turn:  # the first warms up
                    taken[number].append(cost)
        for side in sides:
            side.worker.close()
    cells, rates = [mode, "dimension" if per_dim else "row"], []
    for side, costs in zip(sides, taken, strict=True):
        seconds, cpu = (statistics.median(one) for one in zip(*costs, strict=True))
        rates.append(load.rows / seconds)
        cpu_a_row = f"{cpu / load.rows * 1e6:.2f}"
        cells += [str(side.row_bytes), f"{rates[-1]:,.0f}", cpu_a_row]
    return f"| {' | '.join(cells)} | **{rates[0] / rates[1]:.2f}** |"


def main() -> None:
    """Measure all modes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    load = Load(device, args.layers, args.width, args.prompts, args.length)
    lines = []
    for mode, per_dim in MODES:
        lines.append(line(load, mode, per_dim, args.rounds))
        print(lines[-1], flush=True)
    is_gpu = device.type == "cuda"
    head = HEAD.format(
        **reports.begun(),
        device=torch.cuda.get_device_name(device) if is_gpu else "CPU",
        cores=os.cpu_count(),
        prompts=load.prompts,
        length=load.length,
        layers=load.layers,
        width=load.width,
        rounds=args.rounds,
    )
    if args.out:
        args.out.write_text(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
