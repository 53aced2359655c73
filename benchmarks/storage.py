# SPDX-License-Identifier: Apache-2.0
"""Compares the consumers that write files with one plain sequential writer.

Both write the same rows to the same file system in the same run, alternating; the
plain writer appends to one file. Before each run the page cache is synced, outside the
measured time. Every run gets a new folder, and nothing is deleted before the end unless
`--discard` is given, as ext4 is slow to find an inode after many recent deletions. The
consumer is driven through its thread, as in a worker, and timed until the last result
arrives. Requests have 2 MB (files of 120 KB if each key has its own), 8 MB, or 268 MB:
a prompt of 1,024 tokens at all layers of an 8B-class model.

    python benchmarks/storage.py --folder /data/bench --gib 2 --rounds 3
    python benchmarks/storage.py --folder /data/bench --ways packed ipc --sizes 268
    python benchmarks/storage.py --folder /data/bench --memory-gib 10

The last command only prints how much memory the consumer uses.
"""

import argparse
import os
import shutil
import statistics
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter, process_time, sleep
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for `benchmarks`

from benchmarks.harness import reports  # noqa: E402
from vllm.v1.capture.consumers.arrow import ArrowConsumer  # noqa: E402
from vllm.v1.capture.consumers.filesystem import FilesystemConsumer  # noqa: E402
from vllm.v1.capture.delivery.consumer_thread import Ending, SinkLane  # noqa: E402
from vllm.v1.capture.groups import GroupChunk, GroupEnd  # noqa: E402
from vllm.v1.capture.types import VllmInternalRequestId  # noqa: E402

WORK = ROOT / "build" / "benchmarks"
WIDTH = 4096
ROW_BYTES = WIDTH * 2
GIB = 1 << 30

SHAPES = {
    # Megabytes of a request: its taps, rows of a tap.
    2: (16, 15),
    8: (8, 128),
    268: (32, 1024),
}
WAYS = {
    "per_file": {"default_layout": "per_file"},
    "packed": {"default_layout": "packed"},
    "sharded": {"default_layout": "sharded"},
    "safetensors": {"format": "safetensors"},
    "ipc": {"format": "ipc"},
    "parquet": {"format": "parquet"},
}
UNDER_WAY = 2 << 30
"""Most bytes of requests in flight."""


def facts(num_rows: int, request_id: str) -> dict[str, object]:
    return {
        "dtype": "bfloat16",
        "hidden_size": WIDTH,
        "layer_convention": "0-based block index",
        "model": "benchmark",
        "positions": list(range(num_rows)),
        "token_ids": list(range(num_rows)),
        "num_rows": num_rows,
        "num_prompt_tokens": num_rows,
        "num_generated_tokens": 1,
        "num_samples": 1,
        "sample_index": 0,
        "finish_reason": "length",
        "vllm_internal_request_id": request_id,
        "client_request_id": request_id,
        "client_spec": None,
        "pipeline_parallel_rank": 0,
        "pipeline_parallel_size": 1,
    }


def requests(size: int, total: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Request ids with rows `[taps, rows, width]`, from a small pool of rows."""
    taps, rows = SHAPES[size]
    pool = [torch.randn(taps, rows, WIDTH).bfloat16() for _ in range(4)]
    for number in range(total // (taps * rows * ROW_BYTES)):
        yield f"request-{number}", pool[number % len(pool)]


def plain(folder: Path, way: str, size: int, total: int) -> float:
    items = list(requests(size, total))
    begin = perf_counter()
    with open(folder / "plain.bin", "wb", buffering=0) as file:
        for _, rows in items:
            file.write(memoryview(rows.view(torch.uint8).numpy()).cast("B"))
    return perf_counter() - begin


def consumer(
    folder: Path, way: str, size: int, total: int, fresh: bool = False
) -> float:
    items = requests(size, total) if fresh else list(requests(size, total))
    params = {"root": str(folder / "captures"), **WAYS[way]}
    kind = ArrowConsumer if "format" in params else FilesystemConsumer
    sink = kind(None, params)  # type: ignore[arg-type]
    lane = SinkLane("benchmark", sink, 256 << 20, 1024)
    bad: list[object] = []
    taps, rows = SHAPES[size]
    most = min(256, UNDER_WAY // (taps * rows * ROW_BYTES))
    in_flight = threading.Semaphore(most)

    def answer(result: object) -> None:
        in_flight.release()
        if getattr(result, "status", None) != "ok":
            bad.append(result)
        elif fresh:  # delete files, so that a small disk suffices
            for path in map(Path, getattr(result, "payload", ())):
                path.unlink()
                path.with_suffix(".json").unlink()

    begin = perf_counter()
    for request_id, block in items:
        in_flight.acquire()
        feed(lane, request_id, block.clone() if fresh else block, answer)
    for _ in range(most):
        in_flight.acquire()
    seconds = perf_counter() - begin
    lane.close(60.0)
    if bad:
        sys.exit(f"{len(bad)} requests were not written: {bad[0]}")
    return seconds


def feed(lane: SinkLane, request_id: str, block: torch.Tensor, answer) -> None:  # type: ignore[no-untyped-def]
    num_rows = block.shape[1]
    own = VllmInternalRequestId(request_id)
    taps = tuple((layer, "post_block") for layer in range(len(block)))
    lane.submit([GroupChunk(own, taps, block, 0, 0, [])])
    ends = [GroupEnd(own, taps, facts(num_rows, request_id))]
    lane.finish(Ending(request_id, ends, answer))


def fresh_folder(folder: Path) -> Path:
    os.sync()
    sleep(1)
    new = folder / str(len(list(folder.iterdir())))
    new.mkdir()
    return new


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def timed(
    write: Callable[[Path, str, int, int], float],
    folder: Path,
    way: str,
    size: int,
    total: int,
    discard: bool,
) -> tuple[float, float]:
    """Wall seconds of the writing, and CPU seconds of the process.

    The latter include making the rows, which is equal for both writers.
    """
    fresh = fresh_folder(folder)
    begin = process_time()
    seconds = write(fresh, way, size, total)
    cpu = process_time() - begin
    if discard:
        shutil.rmtree(fresh / "captures", ignore_errors=True)
        (fresh / "plain.bin").unlink(missing_ok=True)
    return seconds, cpu


def compare(
    folder: Path, way: str, size: int, total: int, rounds: int, discard: bool
) -> list[dict[str, float]]:
    """Seconds of both writers and the ratio of their throughputs, by round."""
    found = []
    for _ in range(rounds):
        base, base_cpu = timed(plain, folder, way, size, total, discard)
        ours, ours_cpu = timed(consumer, folder, way, size, total, discard)
        found.append(
            {
                "plain_seconds": base,
                "consumer_seconds": ours,
                "plain_cpu_seconds": base_cpu,
                "consumer_cpu_seconds": ours_cpu,
                "ratio": base / ours,
            }
        )
        print(
            f"{way:11} {size:3} MB: plain {total / base / 1e6:6.0f} MB/s, consumer "
            f"{total / ours / 1e6:6.0f} MB/s, ratio {base / ours:.2f}; CPU seconds a "
            f"GB {base_cpu / total * 1e9:.2f} and {ours_cpu / total * 1e9:.2f}",
            flush=True,
        )
    median = statistics.median(one["ratio"] for one in found)
    print(f"{way:11} {size:3} MB: median ratio {median:.2f}", flush=True)
    return found


def memory(folder: Path, total: int) -> None:
    """Print the resident memory while `total` bytes of new rows are captured."""
    seen: list[float] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            seen.append(resident_mib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    seconds = consumer(fresh_folder(folder), "packed", 8, total, fresh=True)
    done.set()
    watcher.join()
    quarter = max(len(seen) // 4, 1)
    print(
        f"memory: {total / GIB:.1f} GiB in {seconds:.1f} s; resident MiB at most "
        f"{max(seen[:quarter]):.0f} in the first quarter, {max(seen[-quarter:]):.0f} "
        "in the last"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument(
        "--sizes", nargs="+", type=int, choices=SHAPES, default=[8, 268]
    )
    parser.add_argument(
        "--discard", action="store_true", help="delete each run's files after it"
    )
    parser.add_argument("--memory-gib", type=float, default=0.0)
    parser.add_argument("--out", type=Path, default=WORK / "storage.json")
    args = parser.parse_args()
    head, load = reports.begun(), os.getloadavg()
    folder = args.folder / "storage-benchmark"
    folder.mkdir(parents=True, exist_ok=True)
    if args.memory_gib:
        memory(folder, int(args.memory_gib * GIB))
    else:
        total = int(args.gib * GIB)
        report: dict[str, Any] = {
            **head,
            "gib": args.gib,
            "ways": {
                f"{way}, {size} MB": compare(
                    folder, way, size, total, args.rounds, args.discard
                )
                for way in args.ways
                for size in args.sizes
            },
            "machine": reports.machine(load),
        }
        reports.write(report, args.out)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
