# SPDX-License-Identifier: Apache-2.0
"""Claim: what is native gains at least 1.3 times over Python, numpy and torch.

    python benchmarks/native.py --folder /data/bench [--rounds 7]

Each piece of `csrc/` does the same work as the best that Python code has for it, in
turns, in one process and on one thread unless the piece is threads. What gains less is
removed from `csrc/`. Figures are GB of captured rows a second: of processor time of the
thread, or of wall time where threads write; the median over the rounds. `gain` is the
native one over the best other one.
"""

import argparse
import os
import statistics
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from time import perf_counter, thread_time
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for `benchmarks`

from benchmarks import reports  # noqa: E402
from vllm.v1.capture.memory import row_copy as strided  # noqa: E402
from vllm.v1.capture.consumers.storage import quantize  # noqa: E402
from vllm.v1.capture.consumers.storage.files import raw_bytes  # noqa: E402
from vllm.v1.capture.consumers.storage.jobs import (  # noqa: E402
    Permit,
    Publication,
    run,
)
from vllm.v1.capture.consumers.storage.writers import NativeWriters  # noqa: E402
from vllm.v1.capture.memory.parallel_copy import copy_all  # noqa: E402
from vllm.v1.capture.memory.row_copy import RowCopy  # noqa: E402
from vllm.v1.capture.native import library  # noqa: E402

WORK = ROOT / "build" / "benchmarks"
GOAL = 1.3
Way = Callable[[], object]
Case = tuple[str, int, dict[str, Way]]
"""A name, the bytes of rows that one call handles, and the ways to do it."""

NATIVE = library()
assert NATIVE is not None, "there is nothing to measure without the native library"


def gathers() -> Iterator[Case]:
    """Rows of decoding requests, and of prompts, out of the steps' memory."""
    for name, requests, steps, taps, width in (
        ("gather, 32 requests x 128 steps, 16 x 2048", 32, 128, 16, 2048),
        ("gather, 8 requests x 16 steps, 1 x 4096", 8, 16, 1, 4096),
        ("gather, 4 prompts of 256 rows, 32 x 4096", 4, 256, 32, 4096),
    ):
        prompts = "prompts" in name
        rows = steps * requests * taps
        source = torch.randn(rows, width).bfloat16()
        target = torch.empty(requests, taps, steps, width, dtype=torch.bfloat16)
        copies = [
            RowCopy(target[r], 0, source, r * steps, steps, requests * steps, 1)
            if prompts
            else RowCopy(target[r], 0, source, r, steps, requests, requests * taps)
            for r in range(requests)
        ]
        index = torch.arange(rows).view(steps, taps, requests).permute(2, 1, 0)
        flat = index.reshape(-1).contiguous()
        yield (
            name,
            rows * width * 2,
            {
                "native": lambda copies=copies: strided.copy_rows(copies),
                "torch copies": lambda copies=copies: copy_all(
                    [strided.as_tensors(copy) for copy in copies]
                ),
                "torch index_select": lambda s=source, f=flat, t=target: (
                    torch.index_select(s, 0, f, out=t.view(-1, s.shape[1]))
                ),
                "numpy take": lambda s=source.view(torch.int16).numpy(), f=flat.numpy(), t=(target.view(torch.int16).numpy().reshape(-1, width)): (
                    np.take(s, f, axis=0, out=t, mode="clip")
                ),
            },
        )


def torch_full8(rows: torch.Tensor) -> bytes:
    """`full8_reference` by torch, a few rows at a time; finite rows only."""
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


def torch_full8_rows(data: bytes, num_rows: int, width: int) -> torch.Tensor:
    """`full8_rows_reference` by torch, a few rows at a time."""
    record = np.frombuffer(data, dtype=quantize.full8_record(width), count=num_rows)
    rows = torch.empty(num_rows, width, dtype=torch.bfloat16)
    for first in range(0, num_rows, 16):
        part = slice(first, first + 16)
        whole = torch.from_numpy(record["q"][part].astype(np.float32))
        rows[part] = whole * torch.from_numpy(record["scale"][part].copy())[:, None]
    return rows


def torch_topk8(rows: torch.Tensor, k: int) -> bytes:
    """`topk8_reference` by torch, where no magnitudes are equal."""
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
    """A prompt's rows at one layer of an 8B-class model."""
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
    data = quantize.encode_full8(rows)
    shape = 1024, 4096
    yield (
        "full8, decode",
        rows.nbytes,
        {
            "native": lambda: quantize.decode_full8(data, *shape, rows.dtype),
            "numpy": lambda: quantize.full8_rows_reference(data, *shape, rows.dtype),
            "torch": lambda: torch_full8_rows(data, *shape),
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


def checksums() -> Iterator[Case]:
    """CRC32C of a small file's rows, and of many."""
    import crc32c

    for size in (120 << 10, 8 << 20, 256 << 20):
        data = raw_bytes(torch.randint(0, 255, (size,), dtype=torch.uint8))
        yield (
            f"CRC32C of {size >> 10} KiB",
            size,
            {
                "native": lambda data=data: NATIVE.crc32c(data),
                "crc32c, the package": lambda data=data: crc32c.crc32c(data),
            },
        )


def writers(folder: Path) -> Iterator[Case]:
    """Requests' files and their JSON, by two threads."""
    numbers = iter(range(1 << 40))
    for size, requests, files in ((120 << 10, 64, 16), (8 << 20, 16, 2)):
        rows = raw_bytes(torch.randint(0, 255, (size,), dtype=torch.uint8))

        def jobs(rows: memoryview = rows, requests=requests, files=files):  # type: ignore[no-untyped-def]
            own = folder / str(next(numbers))
            own.mkdir()
            return own, [
                [publication(f"{own}/{r}-{f}", rows) for f in range(files)]
                for r in range(requests)
            ]

        yield (
            f"{requests} requests of {files} files of {size >> 10} KiB",
            size * requests * files,
            {
                "native": lambda jobs=jobs: timed(*jobs(), by_native_threads),
                "Python threads": lambda jobs=jobs: timed(*jobs(), by_python_threads),
            },
        )


def publication(base: str, rows: memoryview) -> Publication:
    """A file of rows, and the JSON beside it."""
    return Publication(
        rows_aside=f"{base}.a",
        rows_name=f"{base}.bin",
        rows=[rows],
        index_aside=f"{base}.b",
        index_name=f"{base}.json",
        index=bytes(400),
        replace=True,
        fsync=False,
    )


def timed(own: Path, jobs: Any, write: Callable[[Any], None]) -> float:
    """Wall seconds of the writing."""
    begin = perf_counter()
    write(jobs)
    seconds = perf_counter() - begin
    rmtree(own)
    return seconds


def by_native_threads(requests: Sequence[Sequence[Publication]]) -> None:
    """A queue of files; one Python thread takes the answers."""
    threads = NativeWriters("native", NATIVE.WriterPool(2, 1 << 30, 8 << 20))
    left = threading.Semaphore(0)
    for request in requests:
        for job in request:
            threads.submit(job, lambda error: left.release(), 60.0)
    for _ in range(sum(map(len, requests))):
        left.acquire()
    threads.close(10.0)


def by_python_threads(requests: Sequence[Sequence[Publication]]) -> None:
    """A queue of requests, each written by one thread."""

    def write(request: Sequence[Publication]) -> None:
        for job in request:
            run(job, Permit(), 8 << 20)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(write, requests))


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """The rates of the ways, which take turns."""
    name, size, ways = case
    for way in ways.values():
        way()
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, work in ways.items():
            begin = thread_time()
            took = work()
            one = took if isinstance(took, float) else thread_time() - begin
            seconds[way].append(one)
    rates = {way: size / statistics.median(s) / 1e9 for way, s in seconds.items()}
    best = max(rate for way, rate in rates.items() if way != "native")
    gain = rates["native"] / best
    cells = ", ".join(f"{way} {rate:.2f}" for way, rate in rates.items())
    print(f"{name:45} GB/s: {cells}; gain {gain:.2f}", flush=True)
    return {"gb_per_s": rates, "gain": gain, "stays": gain >= GOAL}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=WORK / "native.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    head, load = reports.begun(), os.getloadavg()
    with TemporaryDirectory(dir=options.folder) as folder:
        pieces = gathers(), codecs(), checksums(), writers(Path(folder))
        found = {
            case[0]: measure(case, options.rounds) for cases in pieces for case in cases
        }
    report = {**head, "rounds": options.rounds, "cases": found}
    reports.save({**report, "machine": reports.machine(load)}, options.out)
    print(f"Written to {options.out}")


if __name__ == "__main__":
    main()
