# SPDX-License-Identifier: Apache-2.0
"""Claim: rows reach the caller, files and HTTP clients as fast as they leave the GPU.

    python benchmarks/delivery.py --fork FORK_PATH --upstream UPSTREAM_PATH \
        [--model 8b] [--folder /data/bench] [--phases offline] [--out delivery.json]

Offline, in turns: upstream's plain prefill; the fork that hands the same prompts' rows,
all positions at all layers, to the caller's memory (`caller`) and to files; upstream's
own `extract_hidden_states` connector until its rows are in the caller's memory; Hugging
Face's `output_hidden_states`; and one thread that appends as many bytes to one file
(`disk`). Large requests have 1,024 tokens; small ones 128; besides there is one prompt
of 512 tokens, and 128 generated tokens of 32 requests. All sides start together.

Over HTTP: one such prompt in each form, until the client has numpy arrays, and 32
requests at once, while `/health` and another request's tokens are timed.

Weights are random. `--device cpu --model tiny --eager` runs without a GPU.
"""

import argparse
import asyncio
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for `benchmarks`

from benchmarks.harness import reports  # noqa: E402
from benchmarks.harness.child import (  # noqa: E402
    ENVIRONMENT,
    Child,
    answers,
    requests,
)
from benchmarks.harness.llamas import MODELS, describe  # noqa: E402

WORK = ROOT / "build" / "benchmarks" / "delivery"
LOADS = {
    # Turn: prompts, their length, tokens to generate.
    "large": (32, 1024, 1),
    "small": (64, 128, 1),
    "one": (1, 512, 1),
    "generated": (32, 16, 128),
}
TURNS = (
    # Side, turn, load.
    ("plain", "plain", "large"),
    ("fork", "caller", "large"),
    ("connector", "connector", "large"),
    ("transformers", "states", "large"),
    ("disk", "disk", "large"),
    ("fork", "packed", "large"),
    ("fork", "sharded", "large"),
    ("fork", "safetensors", "large"),
    ("fork", "ipc", "large"),
    ("fork", "parquet", "large"),
    ("plain", "plain", "small"),
    ("fork", "caller", "small"),
    ("fork", "packed", "small"),
    ("connector", "connector", "small"),
    ("disk", "disk", "small"),
    ("plain", "plain", "one"),
    ("fork", "caller", "one"),
    ("connector", "connector", "one"),
    ("transformers", "states", "one"),
    ("plain", "plain", "generated"),
    ("fork", "generated", "generated"),
)


class Side(Child):
    """A process that takes one side's turns."""

    def __init__(self, role: str, path: str, settings: Mapping[str, Any]) -> None:
        """Start it with this PYTHONPATH; `ready` waits for it."""
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}
        if role not in ("transformers", "disk"):
            # The default for users: the engine core in its own process.
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        command = [sys.executable, __file__, "--child", role, json.dumps(settings)]
        super().__init__(command, WORK / f"{role}.log", environment)
        self.about: dict[str, Any] | None = None

    def ready(self) -> bool:
        """Wait for the start; False if this side is not available."""
        if self.about is None:
            try:
                self.about = self.answer()
            except RuntimeError:
                self.about = {"error": self.log.read_text(errors="replace")[-1500:]}
        return "error" not in self.about


def child(role: str, settings: dict[str, Any]) -> None:
    """Serve the parent's requests."""
    answer = answers()
    from benchmarks.harness.delivery_sides import open_side

    side = open_side(role, settings)
    answer({"start_seconds": side.start_seconds})
    for asked in requests():
        if asked == "memory":
            answer(side.memory())
            continue
        try:
            answer(side.turn(**asked))
        except Exception as error:  # A failed turn must not end the others.
            answer({"error": f"{type(error).__name__}: {error}"})


def offline(options: argparse.Namespace, report: dict[str, Any]) -> None:
    """All turns, round by round; the first round warms up and is not counted."""
    settings = {
        "model": options.model,
        "device": options.device,
        "eager": options.eager,
        "kv_gib": options.kv_gib,
        "tensor_parallel": options.tensor_parallel,
        "folder": str(options.folder),
    }
    paths = {"plain": options.upstream, "connector": options.upstream}
    turns = [turn for turn in TURNS if turn[0] in options.sides]
    if options.turns:
        turns = [turn for turn in turns if turn[1] in options.turns]
    sides = {
        role: Side(role, paths.get(role, options.fork), settings)
        for role in dict.fromkeys(turn[0] for turn in turns)
    }
    turns = [turn for turn in turns if sides[turn[0]].ready()]
    report["sides"] = {role: side.about for role, side in sides.items()}
    for role, about in report["sides"].items():
        print(f"{role}: {about}"[:600], flush=True)
    samples: dict[str, list[dict[str, Any]]] = {}
    report["turns"] = samples
    for number in range(-1, options.rounds):
        for role, name, load in turns if number % 2 else turns[::-1]:
            prompts, length, tokens = sized(load, options)
            found = sides[role].ask(
                {"name": name, "prompts": prompts, "length": length, "tokens": tokens}
            )
            if number < 0:
                if "error" in found:
                    print(f"{load} {name}: {found['error']}", flush=True)
                continue
            found["prompt_tokens"] = prompts * length
            samples.setdefault(f"{load} {name}", []).append(found)
            show(f"{load} {name}", found)
        report["summary"] = evaluated(samples)
        reports.save(report, options.out)
    report["memory"] = memory({role: sides[role].ask("memory") for role, *_ in turns})
    print(json.dumps(report["memory"]), flush=True)
    for side in sides.values():
        side.close()


def memory(found: dict[str, Any]) -> dict[str, Any]:
    """Bytes of each side after its last turn; of the fork's, those beyond upstream's.

    `unstated` are those of them that `GET /v1/capture` does not state.
    """
    if "stated" in found.get("fork", {}) and "plain" in found:
        own = found["fork"]
        own["beyond_plain"] = own["bytes"] - found["plain"]["bytes"]
        held = sum(worker["held_bytes"] for worker in own["stated"])
        own["unstated"] = own["beyond_plain"] - held
    return found


def sized(load: str, options: argparse.Namespace) -> tuple[int, int, int]:
    """The size of a load, reduced on a CPU."""
    prompts, length, tokens = LOADS[load]
    if options.device == "cpu":
        return max(prompts // 8, 1), length, max(tokens // 16, 1)
    return prompts, length, tokens


def show(name: str, found: Mapping[str, Any]) -> None:
    """Print a turn's result."""
    if "error" in found:
        print(f"{name:24} failed: {found['error']}", flush=True)
        return
    seconds = found["seconds"]
    rate = found["prompt_tokens"] / seconds
    print(
        f"{name:24} {seconds:8.3f} s, {rate:9.0f} prompt tokens/s, "
        f"{found['bytes'] / seconds / 1e9:6.2f} GB/s",
        flush=True,
    )


def evaluated(samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Seconds of each turn, and throughput beside plain prefill, connector and disk."""
    seconds = {
        name: [one["seconds"] for one in each if "error" not in one]
        for name, each in samples.items()
    }
    found: dict[str, Any] = {}
    for name, each in seconds.items():
        if not each:
            continue
        load = name.split()[0]
        found[name] = {"seconds": reports.summary(each)}
        for base in ("plain", "connector", "disk"):
            others = seconds.get(f"{load} {base}", [])
            if name.endswith(base) or len(others) != len(each):
                continue
            ratios = [other / own for own, other in zip(each, others)]
            found[name][f"of {base}"] = reports.summary(ratios)
    return found


async def http(options: argparse.Namespace, report: dict[str, Any]) -> None:
    """Requests to a server of the fork."""
    from benchmarks.harness.delivery_client import measure
    from benchmarks.harness.llamas import model_folder
    from benchmarks.harness.served import Server

    arguments = ["--skip-tokenizer-init", "--load-format", "dummy"]
    arguments += ["--max-model-len", "4096", "--max-num-seqs", "64"]
    arguments += ["--capture-consumers", "inline", "--no-enable-prefix-caching"]
    if options.device == "cuda":
        arguments += ["--gpu-memory-utilization", "0.6"]
    if options.eager:
        arguments.append("--enforce-eager")
    arguments += ["--tensor-parallel-size", str(options.tensor_parallel)]
    environment = {"PYTHONPATH": options.fork, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    server = Server(
        Path(model_folder(options.model)),
        WORK / "server.log",
        arguments,
        0,
        environment=environment,
    )
    async with server:
        await server.ready()
        found = report["http"] = {}
        async for name, values in measure(server.url, options.rounds, options.forms):
            found[name] = {**reports.summary(values), "samples": values}
            print(f"http {name:38} {found[name]['median'] * 1e3:9.1f} ms", flush=True)
            reports.save(report, options.out)
        report["http_capture"] = await server.get("/v1/capture")


def main() -> None:
    """Parse the command line, measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fork", help="PYTHONPATH of the fork")
    parser.add_argument("--upstream", help="PYTHONPATH of upstream")
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-gib", type=float, default=5.0, help="of each engine")
    parser.add_argument("--folder", type=Path, default=WORK / "files")
    parser.add_argument("--phases", nargs="+", default=["offline", "http"])
    every = ["plain", "fork", "connector", "transformers", "disk"]
    parser.add_argument("--sides", nargs="+", default=every)
    parser.add_argument("--turns", nargs="+", help="only these; see TURNS")
    parser.add_argument("--forms", nargs="+", default=[], help="of HTTP; all if none")
    parser.add_argument("--out", type=Path, default=WORK / "delivery.json")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options.child[0], json.loads(options.child[1]))
        return
    if not options.fork or not options.upstream:
        parser.error("--fork and --upstream are needed")
    run(options)


def run(options: argparse.Namespace) -> None:
    """Run the requested phases."""
    load_before, begin = os.getloadavg(), time.perf_counter()
    options.folder.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        **reports.begun(),
        "model": describe(options.model),
        "tensor_parallel": options.tensor_parallel,
        "gpu": reports.ask_gpu("name"),
        "loads": {load: sized(load, options) for load in LOADS},
    }
    phases: Iterable[str] = options.phases
    if "offline" in phases:
        offline(options, report)
    if "http" in phases:
        asyncio.run(http(options, report))
    report["machine"] = reports.machine(load_before)
    report["seconds"] = time.perf_counter() - begin
    shutil.rmtree(options.folder, ignore_errors=True)
    for name, one in report.get("summary", {}).items():
        ratios = [f"{key} {one[key]['median']:.3f}" for key in one if key != "seconds"]
        print(f"{name:24} {one['seconds']['median']:.3f} s; {', '.join(ratios)}")
    reports.write(report, options.out)


if __name__ == "__main__":
    main()
