# SPDX-License-Identifier: Apache-2.0
"""Claim: what readouts cost an engine per token, over upstream's.

    python benchmarks/readouts.py --fork FORK_PATH --upstream UPSTREAM_PATH \
        [--model 8b] [--cases probe lens] [--rounds 8] [--out readouts.json]

Two engines, each in a process with PYTHONPATH set to the folder (or folders, separated
by colons) that has its `vllm`, start together and take turns with the same batch of 32
requests. A token's time is that of a long batch less that of a short one, over the
tokens between them. Each case is measured between two turns of upstream's, and its
ratio is to their mean; the first round warms up and is not counted. Prompts of 4,096
tokens are timed whole, with the mean row of all layers. Without `--upstream` the fork
without readouts takes its place. Weights are random.

With `--alone` each engine has the GPU to itself, as users have: upstream's runs before
and after the other, and ratios are to the mean of the medians of both. A second process
made steps with readouts up to 4 % slower on an H200, and those without not.

With `--within` there is only the fork. A ratio is to its own steps without readouts:
the time of each step, as the caller sees it, is the median over all rounds, and their
mean is compared. This finds a percent where whole batches differ by more.

Each figure is printed as it is measured, and the report is written after each round.
`--device cpu --model tiny --eager` runs without a GPU.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # At the end, as the checkout has a folder `vllm` too.

from benchmarks.harness import reports  # noqa: E402
from benchmarks.harness.child import (  # noqa: E402
    ENVIRONMENT,
    Child,
    answers,
    requests,
)
from benchmarks.harness.llamas import MODELS, describe  # noqa: E402

WORK = ROOT / "build" / "benchmarks" / "readouts"
SHORT, LONG = 16, 320
"""Tokens that each request of the two batches generates."""
WITHIN = 144
"""Tokens that each request generates with `--within`."""


@dataclass(frozen=True, slots=True)
class Case:
    """The readouts of some requests of a batch."""

    name: str
    spec: Mapping[str, Any]
    reading: int
    """How many of the batch's requests have readouts."""
    taps: int = 1
    """Rows that each token's result is computed from."""
    is_long: bool = False
    """Whether prompts of 4,096 tokens are timed, instead of generated tokens."""

    @property
    def readouts(self) -> dict[str, Any]:
        """The request's field."""
        return {"r": dict(self.spec)}


def cases(model: str) -> list[Case]:
    """The cases, in the order in which they are measured."""
    layers = MODELS[model]["num_hidden_layers"]
    lens = {"kind": "lens", "layers": "all", "top_k": 5}
    mean = {"kind": "rows", "hooks": {"post_block": "all"}, "reduce": "mean"}
    sae = {"kind": "sae", "sae": "features", "top_k": 32}
    return [
        Case("no readouts", {}, 0),
        Case("one probe", {"kind": "probe", "probe": "one"}, 32),
        Case("256 probes", {"kind": "probe", "probe": "many"}, 32),
        Case("SAE, top 32", sae, 32),
        Case("lens, all layers, 1 of 32", lens, 1, layers),
        Case("lens, all layers, 8 of 32", lens, 8, layers),
        Case("mean row", mean | {"positions": "all_prompt"}, 32, is_long=True),
    ]


class Side(Child):
    """A process with an engine."""

    def __init__(self, role: str, path: str, settings: Mapping[str, Any]) -> None:
        """Start it with this PYTHONPATH; `answer` waits for it."""
        environment = {**os.environ, **ENVIRONMENT}
        # The default for users: the engine core in its own process.
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        if path:
            environment["PYTHONPATH"] = path
        command = [sys.executable, __file__, "--child", role, json.dumps(settings)]
        super().__init__(command, WORK / f"{role}.log", environment)

    def do(self, what: str, **arguments: Any) -> Any:
        """Call a method of the engine.

        Raises:
            RuntimeError: it failed.

        """
        found = self.ask({"what": what, **arguments})
        if isinstance(found, dict) and "error" in found:
            raise RuntimeError(found["error"])
        return found

    def time_of(self, case: Case, reads: bool) -> float:
        """Seconds per token of the batch, or per batch of long prompts."""
        chosen: dict[str, Any] = {}
        if reads and case.reading:
            chosen = {"readouts": case.readouts, "reading": case.reading}
        if case.is_long:
            return float(self.do("seconds", tokens=1, is_long=True, **chosen))
        few, many = (self.do("seconds", tokens=n, **chosen) for n in (SHORT, LONG))
        return float(many - few) / (LONG - SHORT)


def child(role: str, settings: dict[str, Any]) -> None:
    """Serve the parent's requests."""
    answer = answers()
    from benchmarks.harness.readout_sides import Engine

    engine = Engine(role, settings)
    answer({"start_seconds": engine.start_seconds})
    for asked in requests():
        try:
            answer(getattr(engine, asked.pop("what"))(**asked))
        except Exception as error:  # A failed case must not end the others.
            answer({"error": f"{type(error).__name__}: {error}"})


def measure_alone(
    options: argparse.Namespace,
    settings: Mapping[str, Any],
    chosen: Sequence[Case],
    report: dict[str, Any],
) -> None:
    """All rounds, of one engine after the other; the first turns warm up."""
    off = [turns_alone(options, settings, chosen, report)]
    own: dict[str, list[float]] = {case.name: [] for case in chosen}
    with Side("on", options.fork, settings) as on:
        report["start"]["on"] = on.answer()
        check(on, chosen, report)
        for number in range(-1, options.rounds):
            for case in chosen:
                seconds = on.time_of(case, True)
                print(f"  {case.name:28} {1e3 * seconds:.3f} ms", flush=True)
                if number >= 0:
                    own[case.name].append(seconds)
            report["rounds"] = number + 1
            if number >= 0:
                compare_alone(off, own, chosen, report)
                reports.save(report, options.out)
    off.append(turns_alone(options, settings, chosen, report))
    compare_alone(off, own, chosen, report)


def turns_alone(
    options: argparse.Namespace,
    settings: Mapping[str, Any],
    chosen: Sequence[Case],
    report: dict[str, Any],
) -> dict[bool, list[float]]:
    """The times of upstream's turns, by whether prompts are timed."""
    plain = {case.is_long: case for case in chosen}
    with Side("off", options.upstream or options.fork, settings) as off:
        report.setdefault("start", {})["off"] = off.answer()
        taken = {
            is_long: [off.time_of(case, False) for _ in range(options.rounds + 1)][1:]
            for is_long, case in plain.items()
        }
    for is_long, seconds in taken.items():
        kind = "prompts" if is_long else "tokens"
        found = [1e3 * one for one in seconds]
        report["off_ms"].setdefault(kind, []).extend(found)
        print(f"off, {kind}: {[f'{one:.3f}' for one in found]}", flush=True)
    return taken


def compare_alone(
    off: Sequence[Mapping[bool, Sequence[float]]],
    own: Mapping[str, Sequence[float]],
    chosen: Sequence[Case],
    report: dict[str, Any],
) -> None:
    """Put the ratios to upstream's times into the report."""
    for case in chosen:
        base = statistics.mean(statistics.median(one[case.is_long]) for one in off)
        report["samples"][case.name] = [
            base / one if case.is_long else one / base for one in own[case.name]
        ]
    summarise(report, len(own[chosen[0].name]))


def measure_within(
    options: argparse.Namespace,
    settings: Mapping[str, Any],
    chosen: Sequence[Case],
    report: dict[str, Any],
) -> None:
    """The steps of one engine, with each case's readouts in turn."""
    plain, *others = [case for case in chosen if not case.is_long]
    if plain.reading:
        raise SystemExit("--within needs the case 'no readouts'")
    steps: dict[str, list[list[float]]] = {case.name: [] for case in (plain, *others)}
    with Side("on", options.fork, settings) as on:
        report["start"] = {"on": on.answer()}
        check(on, chosen, report)
        for number in range(-1, options.rounds):  # The first one warms up.
            for case in (plain, *others):
                found = on.do("steps", tokens=WITHIN, **_of(case))
                if number >= 0:
                    steps[case.name].append(found)
            if number < 0:
                continue
            report["rounds"] = number + 1
            compare_steps(steps, plain.name, report)
            reports.save(report, options.out)


def compare_steps(
    steps: Mapping[str, Sequence[Sequence[float]]], plain: str, report: dict[str, Any]
) -> None:
    """Put the ratios of mean steps into the report, and their range.

    The range is that of the ratios if one round is left out.

    Args:
        steps: by case and round: the seconds of each step.
        plain: the case without readouts.
        report: the report.

    """
    rounds = range(len(steps[plain]))
    left_out = [None, *rounds] if len(rounds) > 1 else [None]

    def mean(name: str, without: int | None) -> float:
        each = [one for number, one in enumerate(steps[name]) if number != without]
        # A burst of work every few steps counts, a stall of the machine does not.
        return statistics.mean(map(statistics.median, zip(*each, strict=False)))

    base = [mean(plain, one) for one in left_out]
    for name in steps:
        means = [mean(name, one) for one in left_out]
        ratios = [own / off for own, off in zip(means, base, strict=True)]
        report["cases"].setdefault(name, {}).update(
            median=ratios[0],
            smallest=min(ratios),
            largest=max(ratios),
            interval=[min(ratios), max(ratios)],
        )
        report["off_ms"][name] = [1e3 * means[0]]
        print(f"  {name:28} {ratios[0]:.4f}  ({1e3 * means[0]:.3f} ms)", flush=True)


def check(on: Side, chosen: Sequence[Case], report: dict[str, Any]) -> None:
    """Compare results with the engine's own rows, and count their bytes."""
    report["errors"] = on.do("errors")
    print(f"errors against the engine's own rows: {report['errors']}", flush=True)
    for case in chosen:
        if case.reading and not case.is_long:
            moved = on.do("moved", **_of(case), taps=case.taps)
            report["cases"][case.name] = moved
            print(f"{case.name:30} {moved}", flush=True)


def measure(
    off: Side, on: Side, chosen: Sequence[Case], report: dict[str, Any]
) -> None:
    """One round: each case between two turns of the engine without readouts."""
    before: dict[bool, float] = {}
    for case in chosen:
        # Neighbouring cases share the turn between them.
        if case.is_long not in before:
            before = {case.is_long: off.time_of(case, False)}
        own = on.time_of(case, True)
        after = off.time_of(case, False)
        base = (before[case.is_long] + after) / 2
        before = {case.is_long: after}
        ratio = base / own if case.is_long else own / base
        report["samples"].setdefault(case.name, []).append(ratio)
        report["off_ms"].setdefault(case.name, []).append(base * 1e3)
        print(f"  {case.name:28} {ratio:.4f}  (off {base * 1e3:.3f} ms)", flush=True)


def summarise(report: dict[str, Any], count: int) -> None:
    """Put the medians of the last `count` rounds into the report."""
    for name, ratios in report["samples"].items():
        found = reports.summary(ratios[-count:])
        report["cases"].setdefault(name, {}).update(found)


def run(options: argparse.Namespace) -> None:
    """Start both engines, check results, and measure round by round."""
    begin, load = time.perf_counter(), os.getloadavg()
    report: dict[str, Any] = {
        "kind": "readouts",
        **reports.begun(),
        "gpu": reports.ask_gpu("name"),
        "model": describe(options.model),
        "vocab": options.vocab or 32000,
        "upstream": bool(options.upstream),
        "alone": options.alone,
        "within": options.within,
        "cases": {},
        "samples": {},
        "off_ms": {},
    }
    every = cases(options.model)
    wanted = options.cases or [""]
    chosen = [one for one in every if any(text in one.name for text in wanted)]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        names = ("model", "device", "eager", "kv_gib", "vocab")
        settings = {name: getattr(options, name) for name in names}
        settings["folder"] = folder
        if options.within:
            measure_within(options, settings, chosen, report)
        elif options.alone:
            measure_alone(options, settings, chosen, report)
        else:
            base = options.upstream or options.fork
            off = running.enter_context(Side("off", base, settings))
            on = running.enter_context(Side("on", options.fork, settings))
            report["start"] = {"off": off.answer(), "on": on.answer()}
            print(f"started after {time.perf_counter() - begin:.0f} s", flush=True)
            check(on, chosen, report)
            for number in range(options.rounds + 1):
                if number and time.perf_counter() - begin > options.seconds:
                    break
                print(f"round {number}" if number else "warm-up", flush=True)
                measure(off, on, chosen, report)
                summarise(report, max(number, 1))  # The warm-up, if there is no more.
                report["rounds"] = number
                reports.save(report, options.out)
    report["machine"] = reports.machine(load)
    for name, found in report["cases"].items():
        print(f"{name:30} {found['median']:.4f} {found['interval']}")
    reports.write(report, options.out)


def _of(case: Case) -> dict[str, Any]:
    return {"readouts": case.readouts, "reading": case.reading}


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fork", default="", help="PYTHONPATH of the fork")
    parser.add_argument("--upstream", default="", help="PYTHONPATH of upstream")
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--vocab", type=int, default=0, help="default 32,000")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument(
        "--alone", action="store_true", help="one engine after the other"
    )
    parser.add_argument(
        "--within", action="store_true", help="one engine, with and without readouts"
    )
    parser.add_argument("--cases", nargs="+", help="only those whose names hold these")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--seconds", type=float, default=420, help="no round begins after these"
    )
    parser.add_argument("--kv-gib", type=float, default=6.0, help="of each engine")
    parser.add_argument("--out", type=Path, default=WORK / "readouts.json")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options.child[0], json.loads(options.child[1]))
        return
    run(options)


if __name__ == "__main__":
    main()
