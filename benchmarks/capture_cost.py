# SPDX-License-Identifier: Apache-2.0
"""Claim: what capture costs a CPU server, against the same server without it.

    python benchmarks/capture_cost.py            about 21 minutes on idle cores
    python benchmarks/capture_cost.py --quick    about 5 minutes

Two servers of the fork with the same random Llama, 12 layers of width 768, one of them
with the `filesystem` consumer (`packed`), take turns at the same batch of completions.
A round is off, idle, last, four, four, last, idle, off: the ratio of a mode is the time
of its two turns over that of the two turns without capture, so that a machine that gets
slower or faster meanwhile cancels out. "idle": no request is captured; "last": each is,
at its last prompt token and all layers; "four": each is, at all tokens and four layers.
The files are written to disk while the server goes on. See README.md beside this file.
"""

import argparse
import asyncio
import os
import shutil
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for `benchmarks`

from benchmarks.harness import reports  # noqa: E402
from benchmarks.harness.goals import CAPTURE_COST as TARGETS  # noqa: E402
from benchmarks.harness.models import random_llama, random_prompts  # noqa: E402
from benchmarks.harness.reports import summary  # noqa: E402
from benchmarks.harness.served import Cost, Server  # noqa: E402

WORK = ROOT / "build" / "benchmarks"
CAPTURES = WORK / "captures"
LAYERS, WIDTH = 12, 768
SPECS = {
    "last": {"positions": "last_prompt", "hooks": {"post_block": "all"}},
    "four": {"positions": "all", "hooks": {"post_block": [0, 3, 6, 9]}},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One turn's batch."""

    requests: int = 16
    prompt_tokens: int = 64
    generated_tokens: int = 32
    rounds: int = 40


def bodies(load: Load, mode: str) -> list[dict[str, Any]]:
    """The completions of one turn."""
    prompts = random_prompts(load.requests, load.prompt_tokens, load.prompt_tokens)
    return [
        {
            "model": "m",
            "prompt": prompt,
            "max_tokens": load.generated_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        | ({"capture": {"filesystem": SPECS[mode]}} if mode in SPECS else {})
        for prompt in prompts
    ]


async def measure(off: Server, on: Server, load: Load) -> list[dict[str, list[Cost]]]:
    """The costs of every round's turns, by mode."""
    order = ["off", "idle", "last", "four", "four", "last", "idle", "off"]
    turns = {mode: bodies(load, mode) for mode in order}
    for mode in order[:4] * 2:  # warms up caches and threads
        await (off if mode == "off" else on).turn(turns[mode])
    rounds = []
    for number in range(load.rounds):
        costs: dict[str, list[Cost]] = {}
        for mode in order:
            server = off if mode == "off" else on
            costs.setdefault(mode, []).append(await server.turn(turns[mode]))
        rounds.append(costs)
        shutil.rmtree(CAPTURES / "default", ignore_errors=True)  # bounds the disk
        print(f"  {number + 1:>3}  {_line(costs)}", flush=True)
    return rounds


def _line(costs: dict[str, list[Cost]]) -> str:
    """A round's ratios, on the wall and (in brackets) by CPU time."""
    walls = {mode: sum(c.wall for c in both) for mode, both in costs.items()}
    cpus = {mode: sum(c.cpu for c in both) for mode, both in costs.items()}
    parts = [
        f"{m} {walls[m] / walls['off']:.3f} ({cpus[m] / cpus['off']:.3f})"
        for m in TARGETS
    ]
    return f"off {walls['off']:6.2f} s  " + "  ".join(parts)


def ratios(rounds: list[dict[str, list[Cost]]], clock: str) -> dict[str, Any]:
    """Each mode's time over that without capture; `control` is noise alone.

    `last/idle` and `four/idle` compare turns of one server, as two servers with equal
    work may differ by some percent.
    """

    def over(mode: str, other: str) -> dict[str, Any]:
        found = [
            [sum(getattr(cost, clock) for cost in each[m]) for m in (mode, other)]
            for each in rounds
        ]
        return summary([one / two for one, two in found])

    found = {mode: over(mode, "off") for mode in TARGETS}
    found |= {f"{mode}/idle": over(mode, "idle") for mode in SPECS}
    first_over_last = [
        getattr(each["off"][0], clock) / getattr(each["off"][1], clock)
        for each in rounds
    ]
    return {**found, "control": summary(first_over_last)}


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Start both servers, measure, and stop them."""
    load = Load(rounds=options.rounds)
    head, load_before = reports.begun(), os.getloadavg()
    model = random_llama(WORK / "models", LAYERS, WIDTH)
    shutil.rmtree(CAPTURES, ignore_errors=True)
    # Without prefix caching, which would make the ratio of a captured prompt larger.
    common = ["--max-model-len", "256", "--max-num-seqs", "32", "--dtype", model.dtype]
    common += ["--no-enable-prefix-caching"]
    common += ["--enforce-eager"] if options.eager else []
    consumer = [
        "--capture-consumers",
        f"filesystem:root={CAPTURES},default_layout=packed",
    ]

    def serve(name: str, more: list[str]) -> Server:
        log = WORK / "logs" / f"capture-{name}.log"
        return Server(model.folder, log, [*common, *more], options.threads)

    async with serve("off", []) as off:
        await off.ready()
        async with serve("on", consumer) as on:
            await on.ready()
            rounds = await measure(off, on, load)
    shutil.rmtree(CAPTURES, ignore_errors=True)
    turns = [cost for each in rounds for cost in each["off"]]
    return {
        **head,
        "machine": reports.machine(load_before),
        "model": model.name,
        "compiled": not options.eager,
        "load": asdict(load),
        "targets": TARGETS,
        "seconds_off": statistics.median(cost.wall for cost in turns),
        "wall": ratios(rounds, "wall"),
        "cpu": ratios(rounds, "cpu"),
        "rounds": [
            {mode: [asdict(c) for c in costs] for mode, costs in each.items()}
            for each in rounds
        ],
    }


def print_table(report: dict[str, Any]) -> None:
    """Print medians with their 95 % intervals and the goals."""
    print(f"\n{'':<10}{'wall':>30}{'CPU time':>30}{'aim':>8}")
    for name in [*TARGETS, "last/idle", "four/idle", "control"]:
        cells = [report[clock][name] for clock in ("wall", "cpu")]
        texts = [
            f"{c['median']:.3f} ({c['interval'][0]:.3f} to {c['interval'][1]:.3f})"
            for c in cells
        ]
        aim = TARGETS.get(name)
        print(f"{name:<10}{texts[0]:>30}{texts[1]:>30}{'' if aim is None else aim:>8}")


def main() -> None:
    """Parse the command line, measure, write, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a quarter of the rounds")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--threads", type=int, default=1, help="OpenMP threads a side")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--out", type=Path, default=WORK / "capture_cost.json")
    options = parser.parse_args()
    if options.rounds is None:
        options.rounds = Load().rounds // (4 if options.quick else 1)
    report = asyncio.run(run(options))
    print_table(report)
    reports.write(report, options.out)


if __name__ == "__main__":
    main()
