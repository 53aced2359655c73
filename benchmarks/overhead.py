# SPDX-License-Identifier: Apache-2.0
"""Claim: with both features off the fork runs as fast as upstream, on CPU.

    python benchmarks/overhead.py            about 4 minutes on idle cores
    python benchmarks/overhead.py --quick    about 3 minutes

Two processes, one with upstream's release in an environment of its own, one with the
fork, each with the demo model loaded, take turns at the same batch: upstream, fork,
fork, upstream, and the other way round in the next round. The ratio of a round is the
fork's tokens per second over upstream's, so that a machine that gets slower or faster
meanwhile cancels out. Before that, greedy tokens and logprobs of the demo model and
of three tiny random models must agree bit for bit. See README.md beside this file.
"""

import argparse
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for `fork` and `benchmarks`

from benchmarks.harness import reports  # noqa: E402
from benchmarks.harness.engine_process import EngineProcess  # noqa: E402
from benchmarks.harness.environments import make_upstream_environment  # noqa: E402
from benchmarks.harness.equality import Equality, check_processes, compare  # noqa: E402
from benchmarks.harness.models import demo_model, random_prompts, tiny_models  # noqa: E402
from benchmarks.harness.reports import summary  # noqa: E402

WORK = ROOT / "build" / "benchmarks"
TELLING = 0.1
"""A run whose confidence interval is wider than this is inconclusive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The batch that is timed."""

    requests: int = 32
    prompt_tokens: int = 32
    generated_tokens: int = 48
    """Kept small, as sides that take turns quickly share more of the noise."""
    rounds: int = 60

    @property
    def tokens(self) -> int:
        """Tokens generated in one batch."""
        return self.requests * self.generated_tokens


@dataclass(frozen=True, slots=True)
class Round:
    """Tokens per second, and the fork's ratio to upstream."""

    upstream: tuple[float, float]
    fork: tuple[float, float]
    ratio: float
    cpu_ratio: float
    """The ratio by CPU time of the processes, less affected by other programs."""
    control: float
    """Upstream's second batch over its first, which shows the noise."""


def main() -> int:
    """Compare, measure and report; returns 1 if the claim does not hold."""
    options = _options()
    load = Load(rounds=20) if options.quick else Load()
    head, load_before = reports.begun(), os.getloadavg()
    print("Upstream's environment", flush=True)
    python = make_upstream_environment(WORK / "upstream")
    with (
        EngineProcess(python, WORK / "upstream.log", options.threads) as upstream,
        EngineProcess(Path(sys.executable), WORK / "fork.log", options.threads) as fork,
    ):
        identities = check_processes(upstream, fork)
        for side, identity in zip(("upstream", "fork"), identities, strict=True):
            print(f"  {side}: {identity['distributions']}, torch {identity['torch']}")
        equalities = _compare_all(upstream, fork)
        rounds = _measure(upstream, fork, load)
    report = {
        **head,
        "machine": reports.machine(load_before),
        "threads": options.threads,
        "upstream": identities[0]["distributions"],
        "fork": identities[1]["distributions"],
        "torch": identities[1]["torch"],
        "load": asdict(load),
        "equality": [asdict(equality) for equality in equalities],
        "rounds": [asdict(each) for each in rounds],
        "ratio": summary([each.ratio for each in rounds]),
        "cpu_ratio": summary([each.cpu_ratio for each in rounds]),
        "control": summary([each.control for each in rounds]),
    }
    good = _print_verdict(report)
    reports.write(report, options.out)
    return 0 if good else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer, shorter rounds")
    parser.add_argument("--threads", type=int, default=1, help="OpenMP threads a side")
    parser.add_argument("--out", type=Path, default=WORK / "overhead.json")
    return parser.parse_args()


def _compare_all(upstream: EngineProcess, fork: EngineProcess) -> list[Equality]:
    print("\nOutputs, greedy (tokens and logprobs compared bit for bit)", flush=True)
    plan = [(model, True) for model in tiny_models(WORK / "models")]
    # The demo model last, compiled: it stays loaded for the measurement.
    plan += [(demo_model(), True), (demo_model(), False)]
    found = []
    for model, eager in plan:
        equality = compare(upstream, fork, model, eager)
        found.append(equality)
        print(
            f"  {model.name:<7} {equality.mode:<8} {equality.tokens:>5} tokens "
            f"{equality.logprobs:>5} logprobs  {equality.difference or 'equal'}",
            flush=True,
        )
    return found


def _measure(upstream: EngineProcess, fork: EngineProcess, load: Load) -> list[Round]:
    prompts = random_prompts(load.requests, load.prompt_tokens, load.prompt_tokens)
    batch = {"prompts": prompts, "max_tokens": load.generated_tokens}
    for side in (upstream, fork):
        side.do("seconds", **batch)  # warms up caches and threads
    print(f"\nThroughput, {load.requests} requests of {load.generated_tokens} tokens")
    print("  round     upstream (tokens/s)       fork (tokens/s)   ratio   CPU ratio")
    rounds = []
    for number in range(load.rounds):
        sides = [upstream, fork] if number % 2 == 0 else [fork, upstream]
        times = [side.do("seconds", **batch) for side in (*sides, *reversed(sides))]
        by_side = {
            side: [t for s, t in zip((*sides, *reversed(sides)), times) if s is side]
            for side in sides
        }
        rounds.append(_round(by_side[upstream], by_side[fork], load.tokens))
        each = rounds[-1]
        print(
            f"  {number + 1:>5}  {each.upstream[0]:>10.1f} {each.upstream[1]:>10.1f}"
            f"  {each.fork[0]:>10.1f} {each.fork[1]:>10.1f}"
            f"  {each.ratio:>6.3f}  {each.cpu_ratio:>8.3f}",
            flush=True,
        )
    return rounds


def _round(
    upstream: list[dict[str, float]], fork: list[dict[str, float]], tokens: int
) -> Round:
    def total(times: list[dict[str, float]], clock: str) -> float:
        return sum(each[clock] for each in times)

    return Round(
        upstream=(tokens / upstream[0]["wall"], tokens / upstream[1]["wall"]),
        fork=(tokens / fork[0]["wall"], tokens / fork[1]["wall"]),
        ratio=total(upstream, "wall") / total(fork, "wall"),
        cpu_ratio=total(upstream, "cpu") / total(fork, "cpu"),
        control=upstream[0]["wall"] / upstream[1]["wall"],
    )


def _print_verdict(report: dict[str, Any]) -> bool:
    print()
    for name, label in (
        ("ratio", "throughput, fork / upstream"),
        ("cpu_ratio", "by CPU time, fork / upstream"),
        ("control", "upstream / upstream, noise"),
    ):
        s = report[name]
        low, high = s["interval"]
        print(
            f"{label:<29} median {s['median']:.3f}, 95 % interval {low:.3f} to "
            f"{high:.3f}, range {s['smallest']:.3f} to {s['largest']:.3f}"
        )
    differing = [e["model"] for e in report["equality"] if e["difference"]]
    low, high = report["ratio"]["interval"]
    fast = low <= 1.0 <= high
    print(
        "Outputs: "
        + (f"DIFFER for {differing}" if differing else "equal bit for bit")
        + f". A ratio of 1.00 lies {'within' if fast else 'OUTSIDE'} the run's spread."
    )
    if high - low > TELLING:
        print(
            f"The interval is {high - low:.2f} wide: this machine was too busy for "
            "more than a rough answer. Run it again on idle cores."
        )
    return fast and not differing


if __name__ == "__main__":
    sys.exit(main())
