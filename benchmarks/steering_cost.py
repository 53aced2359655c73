# SPDX-License-Identifier: Apache-2.0
"""Claim: what steering costs a CPU server, against the same server without it.

    python benchmarks/steering_cost.py            about 20 minutes on idle cores
    python benchmarks/steering_cost.py --quick    about 8 minutes

Two servers of the fork with the same random Llama, 12 layers of width 768, one of them
with `--enable-steering`, take turns at the same batch of completions. A round is
off, idle, one, all, all, one, idle, off: the ratio of a mode is the time of its two
turns over that of the two turns without steering, so that a machine that gets slower
or faster meanwhile cancels out. "idle": no request is steered; "one": each is, at one
layer; "all": each is, at every layer and hook point, by 16 different named
configurations. Processes with the same work differ by some percent depending on their
memory layout, and the one that starts first is the slower one. The servers are
therefore started twice, in either order, and the ratios of both starts are combined by
their geometric mean, round by round. Then it times the admission of one request at
width 4096. See README.md beside this file.
"""

import argparse
import asyncio
import os
import statistics
import sys
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for `benchmarks`

from benchmarks.harness import reports  # noqa: E402
from benchmarks.harness.admission_time import measure_admission  # noqa: E402
from benchmarks.harness.goals import STEERING_COST as TARGETS  # noqa: E402
from benchmarks.harness.models import random_llama, random_prompts  # noqa: E402
from benchmarks.harness.reports import summary  # noqa: E402
from benchmarks.harness.served import Cost, Server  # noqa: E402
from vllm.v1.steering.spec.files import save_module  # noqa: E402

WORK = ROOT / "build" / "benchmarks"
LAYERS, WIDTH, CONFIGS = 12, 768, 16
HOOKS = ("pre_attn", "post_attn", "post_block")
SETUP_TARGETS = {"named": 0.2, "packed": 2.0}
"""Goals in milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One turn's batch."""

    requests: int = CONFIGS
    prompt_tokens: int = 32
    generated_tokens: int = 32
    rounds: int = 20
    """Rounds per start."""


def write_modules(folder: Path) -> dict[str, Path]:
    """Named vectors: one layer, and 16 times all layers at all hook points."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = torch.Generator().manual_seed(0)

    def vectors(layers: list[int], hooks: tuple[str, ...]) -> Any:
        return {
            hook: {i: torch.randn(WIDTH, generator=draw) * 0.01 for i in layers}
            for hook in hooks
        }

    modules = {"one": vectors([LAYERS // 2], ("post_block",))}
    every = list(range(LAYERS))
    modules |= {f"all{i}": vectors(every, HOOKS) for i in range(CONFIGS)}
    paths = {}
    for name, made in modules.items():
        paths[name] = folder / f"{name}.safetensors"
        save_module(paths[name], made)
    return paths


def bodies(load: Load, mode: str) -> list[dict[str, Any]]:
    """The completions of one turn."""
    prompts = random_prompts(load.requests, load.prompt_tokens, load.prompt_tokens)
    names = {"one": lambda i: "one", "all": lambda i: f"all{i % CONFIGS}"}
    return [
        {
            "model": "m",
            "prompt": prompt,
            "max_tokens": load.generated_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        | ({"steering_name": names[mode](i)} if mode in names else {})
        for i, prompt in enumerate(prompts)
    ]


Round = dict[str, list[Cost]]
"""The costs of a round's turns, by mode."""


async def measure(off: Server, on: Server, load: Load) -> list[Round]:
    """The costs of every round."""
    order = ["off", "idle", "one", "all", "all", "one", "idle", "off"]
    turns = {mode: bodies(load, mode) for mode in order}
    for mode in order[:4] * 2:  # warms up caches and threads
        await (off if mode == "off" else on).turn(turns[mode])
    rounds = []
    for number in range(load.rounds):
        costs: Round = {}
        for mode in order:
            server = off if mode == "off" else on
            costs.setdefault(mode, []).append(await server.turn(turns[mode]))
        rounds.append(costs)
        walls = {mode: sum(c.wall for c in both) for mode, both in costs.items()}
        print(
            f"  {number + 1:>3}  off {walls['off']:6.2f} s  "
            + "  ".join(f"{m} {walls[m] / walls['off']:.3f}" for m in TARGETS),
            flush=True,
        )
    return rounds


def ratios(starts: list[list[Round]], clock: str) -> dict[str, Any]:
    """Each mode's time over that without steering; `control` shows the noise.

    One value for each round: the geometric mean over the starts.
    """

    def seconds(costs: list[Cost]) -> list[float]:
        return [getattr(cost, clock) for cost in costs]

    def ratio(each: Round, mode: str) -> float:
        if mode == "control":
            first, last = seconds(each["off"])
            return first / last
        return sum(seconds(each[mode])) / sum(seconds(each["off"]))

    return {
        mode: summary(
            [
                statistics.geometric_mean([ratio(each, mode) for each in same_number])
                for same_number in zip(*starts, strict=True)
            ]
        )
        for mode in (*TARGETS, "control")
    }


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Start both servers, measure, and stop them."""
    load = Load(rounds=options.rounds)
    head, load_before = reports.begun(), os.getloadavg()
    model = random_llama(WORK / "models", LAYERS, WIDTH)
    modules = write_modules(WORK / "modules")
    common = ["--max-model-len", "256", "--max-num-seqs", "32", "--dtype", model.dtype]
    common += ["--no-enable-prefix-caching", *options.serve]
    steering = ["--enable-steering", "--max-steering-configs", str(CONFIGS)]
    steering += ["--steering-modules", *(f"{n}={p}" for n, p in modules.items())]
    logs = WORK / "steering_cost"
    threads = options.threads
    starts = []
    print(f"{load.requests} requests at once, {load}")
    for first in ("off", "on"):
        servers: dict[str, Server] = {}
        async with AsyncExitStack() as stack:
            for name in ("off", "on") if first == "off" else ("on", "off"):
                arguments = common + (steering if name == "on" else [])
                log = logs / f"{name}-{first}-first.log"
                server = Server(model.folder, log, arguments, threads)
                servers[name] = await stack.enter_async_context(server)
                await server.ready()
            print(f"{first!r} was started first", flush=True)
            starts.append(await measure(servers["off"], servers["on"], load))
    return {
        **head,
        "machine": reports.machine(load_before),
        "threads": threads,
        "torch": torch.__version__,
        "serve": common,
        "load": asdict(load),
        "wall": ratios(starts, "wall"),
        "cpu": ratios(starts, "cpu"),
        "starts": [
            [
                {mode: [asdict(c) for c in costs] for mode, costs in each.items()}
                for each in rounds
            ]
            for rounds in starts
        ],
    }


def main() -> int:
    """Measure and report; returns 1 if a cost exceeds its goal."""
    options = _options()
    report = asyncio.run(run(options))
    report["setup_ms"] = measure_admission()
    good = _print_verdict(report)
    reports.write(report, options.out)
    return 0 if good else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--quick", dest="rounds", action="store_const", const=6)
    parser.add_argument("--threads", type=int, default=1, help="OpenMP threads a side")
    parser.add_argument("--out", type=Path, default=WORK / "steering_cost.json")
    parser.add_argument("serve", nargs="*", help="more arguments for both servers")
    return parser.parse_args()


def _print_verdict(report: dict[str, Any]) -> bool:
    good = True
    for mode in (*TARGETS, "control"):
        for clock in ("wall", "cpu"):
            s = report[clock][mode]
            low, high = s["interval"]
            print(
                f"{mode:<8} {clock:<5} median {s['median']:.4f}, 95 % interval "
                f"{low:.4f} to {high:.4f}"
                + (f", target {TARGETS[mode]}" if mode in TARGETS else "")
            )
        if mode in TARGETS:
            good &= report["cpu"][mode]["median"] <= TARGETS[mode]
    for what, target in SETUP_TARGETS.items():
        median = statistics.median(report["setup_ms"][what])
        print(f"set-up, {what}: median {median:.3f} ms, target {target}")
        good &= median <= target
    return good


if __name__ == "__main__":
    sys.exit(main())
