# SPDX-License-Identifier: Apache-2.0
"""Claim: what a decode step costs a GPU with capture and steering, against upstream's.

    python benchmarks/decode_step.py --fork FORK_PATH [--upstream UPSTREAM_PATH] \\
        [--model 1b|8b] [--variants off,capture,...] [--quick] [--out results.json]

Recorded graphs are replayed, so that the figures exclude CPU time. Two engines share
the GPU, upstream's and one of the fork, each in its own process with PYTHONPATH set to
the folder (or folders, separated by colons) that has its `vllm`. They take turns: each
of the fork's figures is the ratio to upstream's turns directly before and after it, as
the GPU's clock drifts by more than the differences of interest. The first turn at a
batch size is not counted, as the clock takes some steps to settle. Before each round
both record their graphs again, since recordings of the same work differ too; the table
shows by how much upstream's do. Then upstream's engine ends and the last variant takes
turns with itself, which gives the cost of a case over plain steps of the same recording
on a GPU with a single process. Weights are random; the 1B-class model has 16 layers of
width 2048, the 8B-class one 32 of 4096. Also compares the greedy tokens of all engines.
`--quick`: both features on, three batch sizes, four rounds; about three minutes.
`--runner 1`: under the V1 model runner, which records no graphs while serving, so that
exact graphs are those of the start.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for `benchmarks`

from benchmarks.harness import reports  # noqa: E402
from benchmarks.harness.child import ENVIRONMENT, Child  # noqa: E402
from benchmarks.harness.decode_graphs import PLAIN  # noqa: E402
from benchmarks.harness.llamas import MODELS, describe  # noqa: E402

WORK = ROOT / "build" / "benchmarks" / "decode_step"
BATCHES = (1, 8, 32, 128, 256)
QUICK_BATCHES = (1, 32, 256)
VARIANTS = {
    "off": "",
    "capture": "capture",
    "steering": "steering",
    "both": "capture steering",
    "attention": "capture steering attn_in q k v z attn_out",
    "mlp": "capture steering mlp_in mlp_act mlp_out",
    "added": "capture steering embed attn_add mlp_add final_norm",
}
"""Variants of the fork, by enabled features and points inside the block.

With points `plain` is what they cost while idle, and each is used at one layer.
"""
SETTLE = 10
"""Turns at the largest batch size after a recording, before anything is measured.

Recording leaves the GPU idle, and its clock takes up to 50 ms to settle.
"""


class Replays(Protocol):
    """Something that replays graphs: an engine, or the parent's side of one."""

    def record(self) -> object:
        """Record all graphs again."""

    def milliseconds(self, case: str, batch: int) -> float:
        """Of one replay."""


class Engine(Child):
    """The parent's side of `decode_graphs.py`."""

    def __init__(
        self, name: str, path: str, model: str, features: str, batches: Sequence[int]
    ) -> None:
        """Start it."""
        self.name = name
        self.batches = batches
        super().__init__(
            [
                sys.executable,
                ROOT / "benchmarks" / "harness" / "decode_graphs.py",
                model,
                features,
                ",".join(map(str, batches)),
            ],
            WORK / f"{name}.log",
            {**os.environ, **ENVIRONMENT, "PYTHONPATH": path},
        )
        self.about: dict[str, Any] = {}
        """The engine's description of itself, once it is ready."""

    def ready(self) -> None:
        """Wait until the engine accepts requests."""
        self.about = self.about or self.answer()

    def milliseconds(self, case: str, batch: int) -> float:
        """Of one replay."""
        found: float = self.ask({"case": case, "batch": batch})
        return found

    def record(self) -> None:
        """Record all graphs again, and check that the greedy tokens stay the same.

        Raises:
            RuntimeError: the tokens changed.
        """
        if self.ask({}) != self.about["tokens"]:
            raise RuntimeError(f"other tokens with graphs recorded again: {self.log}")

    def report(self) -> dict[str, Any]:
        """Facts about the engine's start."""
        log = self.log.read_text(errors="replace")
        known = {n: self.about[n] for n in ("start_seconds", "peak_memory_bytes")}
        return {**known, **reports.engine_facts(log)}


def compare(
    upstream: Replays,
    fork: Replays,
    cases: Sequence[str],
    batches: Sequence[int],
    rounds: int,
    tells: bool = False,
) -> dict[str, Any]:
    """Milliseconds of each case and batch, and ratios to upstream's plain steps.

    The two take turns, in the opposite order every other round. Both begin a round by
    recording their graphs again. Returns medians over the rounds, with the ratios of
    all rounds in `rounds`. `recordings` has upstream's time in its fastest and in its
    slowest round over the median. If `upstream` and `fork` are the same engine, ratios
    are to its own plain steps. With `tells` each ratio is printed immediately.
    """
    places = [(case, batch) for case in cases for batch in batches]
    pairs: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for number in range(rounds):
        engines = {id(one): one for one in (upstream, fork)}.values()
        for engine in engines:
            engine.record()
        for engine in engines:
            for _ in range(SETTLE):
                engine.milliseconds(PLAIN, max(batches))
        for case, batch in places:
            if number % 2:
                ours, theirs = in_turns((fork, case), (upstream, PLAIN), batch)
            else:
                theirs, ours = in_turns((upstream, PLAIN), (fork, case), batch)
            pairs.setdefault((case, batch), []).append((ours, theirs))
            if tells:
                of_round = f"{number + 1}, {case}, {batch}: {ours:.4f}"
                print(f"  round {of_round} ({ours / theirs:.4f})", flush=True)
    report: dict[str, Any] = {
        "milliseconds": {},
        "ratio": {},
        "range": {},
        "rounds": {},
    }
    for (case, batch), taken in pairs.items():
        ratios = [ours / theirs for ours, theirs in taken]
        found = {name: by_case.setdefault(case, {}) for name, by_case in report.items()}
        found["milliseconds"][batch] = statistics.median(ours for ours, _ in taken)
        found["ratio"][batch] = statistics.median(ratios)
        found["range"][batch] = [min(ratios), max(ratios)]
        found["rounds"][batch] = ratios
    report["recordings"] = {
        batch: _extremes([theirs for _, theirs in pairs[cases[0], batch]])
        for batch in batches
    }
    return report


def in_turns(
    first: tuple[Replays, str], second: tuple[Replays, str], batch: int
) -> tuple[float, float]:
    """Milliseconds of two engines' cases, arranged so that a steady drift cancels.

    The first turn of each is not counted, while the clock settles. Each turn follows a
    turn of the other engine: a GPU at its power limit is faster after the pause that
    switching engines takes.
    """
    taken = [
        engine.milliseconds(case, batch)
        for engine, case in [first, second, first, second, first, second, first]
    ]
    return statistics.fmean(taken[2::2]), statistics.fmean(taken[3::2])


def _extremes(values: Sequence[float]) -> list[float]:
    """The smallest and the largest, over the median."""
    median = statistics.median(values)
    return [min(values) / median, max(values) / median]


def main() -> None:
    """Parse the command line, take turns, print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fork", required=True, help="PYTHONPATH of the fork")
    parser.add_argument(
        "--upstream",
        help="PYTHONPATH of upstream; without it only what cases cost over plain steps "
        "of the fork's",
    )
    parser.add_argument("--model", choices=MODELS, default="1b")
    parser.add_argument("--variants", help="default all; both with --quick")
    parser.add_argument("--only", default="", help="cases whose names hold this")
    parser.add_argument("--runner", choices=("1", "2"), default="2")
    parser.add_argument("--rounds", type=int, help="default 6; 4 with --quick")
    parser.add_argument("--quick", action="store_true", help="about 3 minutes")
    parser.add_argument(
        "--together",
        action="store_true",
        help="start both engines at once, which says nothing of how long a start takes",
    )
    parser.add_argument("--out", type=Path, default=WORK / "decode_step.json")
    args = parser.parse_args()
    names = (args.variants or ("both" if args.quick else ",".join(VARIANTS))).split(",")
    batches = QUICK_BATCHES if args.quick else BATCHES
    rounds = args.rounds or (4 if args.quick else 6)
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(args.runner) - 1)
    report: dict[str, Any] = {**reports.begun(), "model": describe(args.model)}
    report["runner"] = f"V{args.runner}"

    def start(name: str) -> Engine:
        return Engine(name, args.fork, args.model, VARIANTS[name], batches)

    def chosen(fork: Engine) -> list[str]:
        return [one for one in fork.about["cases"] if args.only in one]

    if args.upstream is None:
        compare_alone(report, (start(name) for name in names), chosen, rounds, args.out)
        return
    with ExitStack() as running:
        upstream = Engine("upstream", args.upstream, args.model, "", batches)
        running.enter_context(upstream)
        early = [running.enter_context(start(n)) for n in names[:1] if args.together]
        for engine in (upstream, *early):
            engine.ready()  # An engine that is still starting would disturb the others.
        report |= {name: upstream.about[name] for name in ("device", "torch")}
        noise = compare(upstream, upstream, [PLAIN], batches, rounds)
        report["variants"] = {"upstream": {**upstream.report(), **noise}}
        print_variant("upstream, by itself", report["variants"]["upstream"])
        for name in names:
            with early.pop() if early else start(name) as fork:
                fork.ready()
                cases = chosen(fork)
                found = compare(upstream, fork, cases, batches, rounds, tells=True)
                same = fork.about["tokens"] == upstream.about["tokens"]
                of_variant = {"same_tokens_as_upstream": same, **found}
                report["variants"][name] = {**fork.report(), **of_variant}
                reports.save(report, args.out)  # in case it is cut short
                if name == names[-1]:
                    upstream.close()
                    alone = compare(fork, fork, cases, batches, rounds)
                    report["variants"][name]["over_own_plain"] = alone
            reports.save(report, args.out)
            print_variant(name, report["variants"][name])
    reports.write(report, args.out)


def compare_alone(
    report: dict[str, Any],
    engines: Iterable[Engine],
    cases_of: Callable[[Engine], list[str]],
    rounds: int,
    out: Path,
) -> None:
    """Measure cases over the same engine's plain steps, one engine after another."""
    report["variants"] = {}
    for fork in engines:
        with fork:
            fork.ready()
            report |= {one: fork.about[one] for one in ("device", "torch")}
            cases, batches = cases_of(fork), fork.batches
            found = compare(fork, fork, cases, batches, rounds, tells=True)
            report["variants"][fork.name] = {**fork.report(), "over_own_plain": found}
        reports.save(report, out)
        print(f"{fork.name}, alone, over its own plain steps:")
        print_ratios(found, "plain, over its median")
    reports.write(report, out)


def print_variant(name: str, variant: dict[str, Any]) -> None:
    """Print milliseconds of a decode step with the ratio to upstream in brackets."""
    graphs = variant.get("graph_gib")
    print(
        f"{name}: start {variant['start_seconds']:.1f} s, "
        + (f"graphs {graphs:.2f} GiB, " if graphs is not None else "")
        + f"peak memory {variant['peak_memory_bytes'] / 2**20:.0f} MiB, same tokens as "
        f"upstream: {variant.get('same_tokens_as_upstream', True)}"
    )
    print_ratios(variant, "upstream, over its median")
    if "over_own_plain" in variant:
        print(f"{name}, alone, over its own plain steps:")
        print_ratios(variant["over_own_plain"], "plain, over its median")


def print_ratios(report: dict[str, Any], of_recordings: str) -> None:
    """Print the results of `compare`, one line per case."""
    for case, by_batch in report["milliseconds"].items():
        ratios = report["ratio"][case]
        cells = [f"{b}: {ms:.4f} ({ratios[b]:.4f})" for b, ms in by_batch.items()]
        print(f"  {case:46s} " + "  ".join(cells), flush=True)
    ranges = report["recordings"].items()
    cells = [f"{b}: {low:.4f} to {high:.4f}" for b, (low, high) in ranges]
    print(f"  {of_recordings:46s} " + "  ".join(cells), flush=True)


if __name__ == "__main__":
    main()
