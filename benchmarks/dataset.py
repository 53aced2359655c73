# SPDX-License-Identifier: Apache-2.0
"""What `vllm capture` costs beside plain generation: 10,000 prompts of 64 tokens.

    python benchmarks/dataset.py --out benchmarks/results/DATE-dataset-cpu.json

Three processes take the same prompts in turn, the first of a turn changing, so whatever
else the machine does hits all of them:

- `generate`: an engine that only generates, by `LLM.generate`;
- `capture`: what `vllm capture` does, a data set of two layers (checked source, Parquet
  files, checksums, manifest), with the allocator's settings of the command;
- `generate_kept`: as `generate`, with the same settings of the allocator.

A ratio is the seconds of either plain side over those of `capture`, which is the ratio
of throughputs; `cpu_ratio` is the same from the processes' CPU time. `--plain generate`
leaves the third process out. `rss_mib` is a process's resident memory after its turn.
The report is saved after each turn.

Memory: then the command itself takes all prompts in one run, and its resident memory is
read after each shard.
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `benchmarks`

from benchmarks.harness import reports

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
DEMO = Path(__file__).parents[1] / "examples" / "demo_model" / "weights"
TOKENS, LAYERS, HIGHEST_ID = 64, (1, 4), 900
SHARD_BYTES = 16 << 20
PLAIN = ("generate", "generate_kept")
ENGINE = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256}


def main() -> None:
    """Measure both, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--prompts", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument(
        "--turns-only", action="store_true", help="leave the whole run out"
    )
    parser.add_argument("--plain", nargs="+", choices=PLAIN, default=list(PLAIN))
    args = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    report = reports.begun() | {
        "what": "throughput of vllm capture over that of plain generation",
        "model": args.model.name if args.model != DEMO else "the demo model",
        "prompts": args.prompts,
        "tokens_each": TOKENS,
        "layers": list(LAYERS),
        "threads_of_each": os.environ.get("OMP_NUM_THREADS", "all cores"),
    }
    load = os.getloadavg()
    chance = random.Random(0)
    prompts = [
        [chance.randrange(20, HIGHEST_ID) for _ in range(TOKENS)]
        for _ in range(args.prompts)
    ]
    with tempfile.TemporaryDirectory() as folder:
        turns(args, prompts, Path(folder), report)
        if not args.turns_only:
            report["whole_run"] = whole_run(args, prompts, Path(folder))
    report["machine"] = reports.machine(load)
    print(json.dumps(report, indent=1))
    reports.write(report, args.out)


def turns(
    args: argparse.Namespace,
    prompts: list[list[int]],
    folder: Path,
    report: dict[str, Any],
) -> None:
    """All sides in turn over parts of the prompts."""
    size, names = len(prompts) // args.turns, ("capture", *args.plain)
    found: list[dict[str, float]] = []
    report["turns"] = found
    sides = {name: Side(name, args.model, folder) for name in names}
    for side in sides.values():
        side.take(prompts[: min(64, size)])  # Warms up.
    for turn in range(args.turns):
        part = prompts[turn * size : (turn + 1) * size]
        first = turn % len(names)
        found.append({})
        for name in names[first:] + names[:first]:
            found[-1] |= sides[name].take(part)
        report["prompts"] = size * len(found)
        report |= {f"over_{plain}": summary(found, plain) for plain in args.plain}
        reports.save(report, args.out)
        print(found[-1], flush=True)
    for side in sides.values():
        side.end()


class Side:
    """A process that takes prompts when it is told to."""

    def __init__(self, name: str, model: Path, folder: Path) -> None:
        self._name = name
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(name, str(model), folder, theirs), daemon=True
        )
        self._process.start()
        self._pipe.recv()

    def take(self, part: list[list[int]]) -> dict[str, float]:
        """Run prompts; seconds, CPU time of all threads, resident memory."""
        self._pipe.send(part)
        figures: dict[str, float] = self._pipe.recv()
        return {f"{self._name}_{what}": value for what, value in figures.items()}

    def end(self) -> None:
        """Stop the process."""
        self._pipe.send(None)
        self._process.join()


def serve(name: str, model: str, folder: Path, pipe: Connection) -> None:
    """What a side's process does."""
    if name != "generate":
        from vllm.capture_dataset.runners import keep_freed_memory

        assert keep_freed_memory(), "this needs glibc"
    run = capturing(model, folder) if name == "capture" else generating(model)
    pipe.send(None)
    while (part := pipe.recv()) is not None:
        began, used = time.perf_counter(), time.process_time()
        run(part)
        seconds, used = time.perf_counter() - began, time.process_time() - used
        figures = {"seconds": round(seconds, 3), "cpu": round(used, 3)}
        pipe.send(figures | {"rss_mib": resident_mib(os.getpid())})


def generating(model: str) -> Callable[[list[list[int]]], None]:
    """Plain generation."""
    from vllm import LLM, SamplingParams

    plain = LLM(model, **ENGINE)
    params = SamplingParams(max_tokens=1, temperature=0.0)

    def generate(part: list[list[int]]) -> None:
        asked: Any = [{"prompt_token_ids": prompt} for prompt in part]
        plain.generate(asked, params, use_tqdm=False)

    return generate


def capturing(model: str, folder: Path) -> Callable[[list[list[int]]], None]:
    """What the command does with a source, once the engine has started."""
    from vllm import LLM
    from vllm.capture_dataset.collect import collect
    from vllm.capture_dataset.plan import Plan
    from vllm.capture_dataset.progress import Progress
    from vllm.capture_dataset.runners import CONSUMER, EngineRunner
    from vllm.capture_dataset.spec import OutputSpec, RowsSpec, SourceSpec
    from vllm.capture_dataset.survey import Survey

    runner = EngineRunner(LLM(model, capture_consumers=[CONSUMER], **ENGINE))

    def capture(part: list[list[int]]) -> None:
        source, out = write_source(folder / "part.jsonl", part), folder / "part"
        survey = Survey.of(SourceSpec(path=source))
        output = OutputSpec(folder=out, shard_bytes=SHARD_BYTES)
        plan = Plan.of(survey, RowsSpec(layers=LAYERS), output, runner)
        rows = collect(plan, runner, Progress(1, disable=True)).shards
        assert sum(one.num_rows for one in rows) == 2 * TOKENS * len(part)
        shutil.rmtree(out)

    return capture


def summary(found: list[dict[str, float]], plain: str) -> dict[str, Any]:
    """Ratios over all turns: of sums, and the median with the range of single ones."""
    figures: dict[str, Any] = {}
    for what, name in (("seconds", "ratio"), ("cpu", "cpu_ratio")):
        ratios = [turn[f"{plain}_{what}"] / turn[f"capture_{what}"] for turn in found]
        sums = [sum(t[f"{side}_{what}"] for t in found) for side in (plain, "capture")]
        figures[name] = {
            "of_sums": round(sums[0] / sums[1], 4),
            "median": round(statistics.median(ratios), 4),
            "range": [round(min(ratios), 4), round(max(ratios), 4)],
        }
    return figures


def write_source(path: Path, prompts: list[list[int]]) -> Path:
    """Prompts as JSON lines."""
    path.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    return path


def whole_run(
    args: argparse.Namespace, prompts: list[list[int]], folder: Path
) -> dict[str, Any]:
    """The command over all prompts; its memory after each shard."""
    source, out = write_source(folder / "all.jsonl", prompts), folder / "all"
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "capture"]
    command += [str(source), "--model", str(args.model), "--out", str(out)]
    command += ["--layers", ",".join(map(str, LAYERS)), "--dtype", "float32"]
    command += ["--shard-size", str(SHARD_BYTES), "--enforce-eager"]
    command += ["--max-model-len", str(ENGINE["max_model_len"])]
    began, seen = time.perf_counter(), {}
    with (folder / "log").open("wb") as log:
        running = subprocess.Popen(command, stdout=log, stderr=log)
        while running.poll() is None:
            time.sleep(0.1)
            shards = len(list(out.glob("*.parquet")))
            if shards and shards not in seen:
                seen[shards] = resident_mib(running.pid)
    assert running.returncode == 0, (folder / "log").read_text()[-4000:]
    memory = [size for size in seen.values() if size]
    assert len(memory) > 4, "too few shards to tell how memory grows; more --prompts"
    manifest = json.loads((out / "_manifest.json").read_text())
    return {
        "seconds_with_start": round(time.perf_counter() - began, 1),
        "counts": manifest["counts"],
        "shards": len(manifest["shards"]),
        "resident_mib": {
            # The first shards fill pools and caches.
            "after_4_shards": memory[3],
            "median": statistics.median(memory[3:]),
            "most_after_that": max(memory[3:]),
            "last": memory[-1],
        },
    }


def resident_mib(pid: int) -> float:
    """Resident memory of a process; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    sizes = [line.split()[1] for line in lines if line.startswith("VmRSS")]
    return round(int(sizes[0]) / 1024, 1) if sizes else 0.0


if __name__ == "__main__":
    main()
