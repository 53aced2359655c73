# SPDX-License-Identifier: Apache-2.0
"""Claim: native code is at least 1.3 times as fast as Python, numpy and torch.

    python benchmarks/native.py [--rounds 7]

Each function of `csrc/` takes turns with the best equivalent Python code, in one
process and on one thread unless it is about threads. Code that gains less is removed
from `csrc/`. Figures are GB of captured rows per second of CPU time, as the median over
the rounds; `gain` is the native figure over the best other one. The report of
2026-11-22 also has code that was removed because of it: the CRC32C, which a package
computes twice as fast; threads that write files, no faster than one Python thread per
request; and the full8 decoder, no faster than torch.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for `benchmarks`

from benchmarks.harness import reports  # noqa: E402
from vllm.v1.capture.consumers.storage import quantize  # noqa: E402
from vllm.v1.capture.memory import row_copy  # noqa: E402
from vllm.v1.capture.memory.row_copy import RowCopy, copy_all  # noqa: E402
from vllm.v1.residual.native import library  # noqa: E402

WORK = ROOT / "build" / "benchmarks"
GOAL = 1.3
Way = Callable[[], object]
Case = tuple[str, int, dict[str, Way]]
"""A name, the bytes of rows per call, and the implementations by name."""

assert library() is not None, "there is nothing to measure without the native library"


def gathers() -> Iterator[Case]:
    """Cases that gather rows of decoding requests and of prompts from steps."""
    for name, requests, steps, taps, width in (
        ("gather, 32 requests x 128 steps, 16 x 2048", 32, 128, 16, 2048),
        ("gather, 8 requests x 16 steps, 1 x 4096", 8, 16, 1, 4096),
        ("gather, 32 requests x 1 step, 16 x 2048", 32, 1, 16, 2048),
        ("gather, 4 prompts of 256 rows, 32 x 4096", 4, 256, 32, 4096),
    ):
        rows = steps * requests * taps
        source = torch.randn(rows, width).bfloat16()
        target = torch.empty(requests, taps, steps, width, dtype=torch.bfloat16)
        copies = [
            RowCopy(target[r], 0, source, r * steps, steps, requests * steps, 1)
            if "prompts" in name
            else RowCopy(target[r], 0, source, r, steps, requests, requests * taps)
            for r in range(requests)
        ]
        ways: dict[str, Way] = {
            "native": partial(row_copy.copy_rows, copies),
            "torch copies": partial(by_torch_copies, copies),
            "torch index_select": partial(by_index_select, copies),
            "numpy take": partial(by_take, copies),
        }
        yield name, rows * width * 2, ways


def by_torch_copies(copies: Sequence[RowCopy]) -> None:
    """Copy strided views, with one torch call for all of them."""
    copy_all([row_copy.as_tensors(copy) for copy in copies])


def index_of(copy: RowCopy) -> npt.NDArray[np.int64]:
    """The indices of the source rows, in the order of the target."""
    taps = copy.first + copy.tap_stride * np.arange(copy.target.shape[0])
    return (taps[:, None] + copy.row_stride * np.arange(copy.num_rows)).reshape(-1)


def by_index_select(copies: Sequence[RowCopy]) -> None:
    """Gather with torch, one index array per target."""
    for copy in copies:
        index = torch.from_numpy(index_of(copy))
        torch.index_select(copy.source, 0, index, out=copy.target.flatten(0, 1))


def by_take(copies: Sequence[RowCopy]) -> None:
    """Gather with numpy, one index array per target."""
    for copy in copies:
        source = copy.source.view(torch.int16).numpy()
        target = copy.target.flatten(0, 1).view(torch.int16).numpy()
        np.take(source, index_of(copy), axis=0, out=target, mode="clip")


def torch_full8(rows: torch.Tensor) -> bytes:
    """`full8_reference` in torch, a few rows at a time; finite rows only."""
    record = np.empty(len(rows), dtype=quantize.full8_record(rows.shape[1]))
    scales, integers = torch.from_numpy(record["scale"]), record["q"]
    for first in range(0, len(rows), 16):
        values = rows[first : first + 16].float()
        scale = values.abs().amax(1) / 127
        scales[first : first + 16] = scale
        unit = torch.where(scale > 0, scale, 1).double()
        whole = (values.double() / unit[:, None]).round_().to(torch.int8)
        integers[first : first + 16] = whole.numpy()
    return record.tobytes()


def torch_topk8(rows: torch.Tensor, k: int) -> bytes:
    """`topk8_reference` in torch, for rows without equal magnitudes."""
    record = np.empty(len(rows), dtype=quantize.topk8_record(k))
    values = rows.float()
    kept = values.abs().topk(k, dim=1, sorted=False).indices.sort(dim=1).values
    chosen = values.gather(1, kept)
    scale = chosen.abs().amax(1) / 127
    whole = (chosen.double() / scale.double()[:, None]).round_()
    record["index"], record["scale"] = kept.numpy(), scale.numpy()
    record["q"] = whole.to(torch.int8).numpy()
    return record.tobytes()


def codecs() -> Iterator[Case]:
    """Cases that encode a prompt's rows at one layer of an 8B-class model."""
    rows = torch.randn(1024, 4096).bfloat16()
    assert torch_full8(rows) == quantize.encode_full8(rows)
    yield (
        "full8, encode",
        rows.nbytes,
        {
            "native": lambda: quantize.encode_full8(rows),
            "numpy": lambda: quantize.full8_reference(rows),
            "torch": lambda: torch_full8(rows),
        },
    )
    yield (
        "topk8:64, encode",
        rows.nbytes,
        {
            "native": lambda: quantize.encode_topk8(rows, 64),
            "numpy": lambda: quantize.topk8_reference(rows, 64),
            "torch": lambda: torch_topk8(rows, 64),
        },
    )


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Measure the implementations of a case in turns."""
    name, size, ways = case
    for way in ways.values():
        way()
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, work in ways.items():
            begin = thread_time()
            work()
            seconds[way].append(thread_time() - begin)
    rates = {way: size / statistics.median(s) / 1e9 for way, s in seconds.items()}
    best = max(rate for way, rate in rates.items() if way != "native")
    gain = rates["native"] / best
    cells = ", ".join(f"{way} {rate:.2f}" for way, rate in rates.items())
    print(f"{name:45} GB/s: {cells}; gain {gain:.2f}", flush=True)
    return {"gb_per_s": rates, "gain": gain, "stays": gain >= GOAL}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=WORK / "native.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    head, load = reports.begun(), os.getloadavg()
    found = {
        case[0]: measure(case, options.rounds)
        for cases in (gathers(), codecs())
        for case in cases
    }
    report = {**head, "rounds": options.rounds, "cases": found}
    reports.write({**report, "machine": reports.machine(load)}, options.out)


if __name__ == "__main__":
    main()
