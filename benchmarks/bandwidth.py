# SPDX-License-Identifier: Apache-2.0
"""Claim: capturing whole prompts to host memory keeps 0.90 of upstream's throughput.

    python benchmarks/bandwidth.py --fork FORK_PATH --upstream UPSTREAM_PATH \
        [--model 1b|8b] [--quick] [--out bandwidth.json]

First the stages that rows pass, without a model, in bytes per second: the copy from the
device to pinned host memory alone; from there to a consumer that drops its rows; and
both together. Then two engines share the GPU, upstream's and the fork's with a
consumer that keeps each request's rows in host memory until its end. They take turns at
the same prompts of 4096 tokens: upstream, the fork without capture, the fork with all
positions at all layers, and back. A turn ends when the last row has arrived. Each ratio
is one of throughputs in the same round. Weights are random.

With `--device cpu --model tiny --eager` it runs without a GPU, to try it out.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for `benchmarks`

from benchmarks.harness import reports  # noqa: E402
from benchmarks.harness.child import ENVIRONMENT, Child, answers, requests  # noqa: E402
from benchmarks.harness.host_memory import NAME, plug_in  # noqa: E402
from benchmarks.harness.llamas import MODELS, describe, model_folder  # noqa: E402

WORK = ROOT / "build" / "benchmarks" / "bandwidth"
TURNS = ("upstream", "plain", "captured")
RATIOS = {
    "captured / upstream": ("captured", "upstream"),
    "captured / plain": ("captured", "plain"),
    "plain / upstream": ("plain", "upstream"),
}


class Side(Child):
    """A process with upstream, the fork, or the stages without an engine."""

    def __init__(self, python: Path, path: str, role: str, settings: Any) -> None:
        """Start it with this PYTHONPATH, and wait until it is ready."""
        begin = time.monotonic()
        super().__init__(
            [python, __file__, "--child", role, json.dumps(settings)],
            WORK / f"{role}.log",
            {**os.environ, **ENVIRONMENT, "PYTHONPATH": path},
        )
        self.about: dict[str, Any] = self.answer()
        self._start_seconds = time.monotonic() - begin

    def start(self) -> dict[str, float]:
        """Seconds until it was ready, and what its log says of the start."""
        log = self.log.read_text(errors="replace")
        return {"seconds": self._start_seconds, **reports.engine_facts(log)}


class Engine:
    """The child's side: an engine and the prompts."""

    def __init__(self, role: str, settings: dict[str, Any]) -> None:
        import torch

        from vllm import LLM, SamplingParams

        self._device, length = settings["device"], settings["prompt_len"]
        chosen: dict[str, Any] = {"enforce_eager": settings["eager"]}
        if self._device == "cuda":
            chosen["gpu_memory_utilization"] = settings["memory"]
        if role == "fork":
            chosen["capture_consumers"] = [NAME]
            if settings["staging_mib"]:
                chosen["capture_staging_bytes"] = settings["staging_mib"] << 20
        self._llm = LLM(
            model=model_folder(settings["model"]),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=length + 8,
            max_num_seqs=settings["prompts"],
            # Prompts repeat between turns and must be computed each time.
            enable_prefix_caching=False,
            **chosen,
        )
        draw = torch.Generator().manual_seed(5)
        tokens = torch.randint(32000, (settings["prompts"], length), generator=draw)
        self._prompts: list[Any] = [
            {"prompt_token_ids": ids} for ids in tokens.tolist()
        ]
        self._params: dict[str, Any] = {
            "temperature": 0,
            "max_tokens": 1,
            "detokenize": False,
        }
        self._make_params = SamplingParams

    def turn(self, captured: bool) -> dict[str, float]:
        """All prompts at once: seconds until everything is there, and rows."""
        spec = {"positions": "all_prompt", "hooks": {"post_block": "all"}}
        fields: dict[str, Any] = {"capture": {NAME: spec}} if captured else {}
        params = self._make_params(**self._params, **fields)
        begin = time.perf_counter()
        outputs = self._llm.generate(self._prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        rows = 0
        for output in outputs if captured else ():
            assert output.capture_results is not None
            result = output.capture_results[NAME]
            if result.status != "ok":
                raise RuntimeError(f"a capture failed: {result}")
            rows += sum(result.payload)
        return {"seconds": seconds, "rows": rows}

    def memory(self) -> dict[str, float]:
        """Peak GPU memory of this process's tensors, including graphs."""
        import torch

        if self._device != "cuda":
            return {}
        peak = torch.cuda.memory_stats()["reserved_bytes.all.peak"]
        return {"peak_gpu_gib": peak / reports.GIB}


def child(role: str, settings: dict[str, Any]) -> None:
    """Serve the parent's requests."""
    answer = answers()

    import torch

    import vllm

    about = {
        "vllm": vllm.__version__,
        "has_capture": (Path(vllm.__file__).parent / "v1" / "capture").is_dir(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    if role == "stages":
        from benchmarks.harness.stages import measure

        size = MODELS[settings["model"]]
        answer(about)
        for _ in requests():
            answer(
                measure(
                    size["num_hidden_layers"],
                    size["hidden_size"],
                    settings["prompt_len"],
                    settings["device"],
                    settings["stage_rounds"],
                )
            )
        return
    engine = Engine(role, settings)
    answer(about)
    for what in requests():
        answer(engine.memory() if what == "memory" else engine.turn(what == "captured"))


def take_turns(
    upstream: Side, fork: Side, settings: Mapping[str, Any], rounds: int
) -> Iterator[dict[str, list[float]]]:
    """Yield the seconds of both turns of each kind per round, after a warm-up round."""
    size = MODELS[settings["model"]]
    tokens = settings["prompts"] * settings["prompt_len"]
    expected = tokens * size["num_hidden_layers"]
    for number in range(-1, rounds):
        seconds: dict[str, list[float]] = {}
        for name in (*TURNS, *TURNS[::-1]):
            turn = (upstream if name == "upstream" else fork).ask(name)
            if name == "captured" and turn["rows"] != expected:
                raise RuntimeError(f"{turn['rows']} of {expected} rows arrived")
            seconds.setdefault(name, []).append(turn["seconds"])
        if number >= 0:
            speeds = {name: 2 * tokens / sum(both) for name, both in seconds.items()}
            cells = [f"{name} {speed:.0f}" for name, speed in speeds.items()]
            print(f"  {number + 1}: tokens/s " + ", ".join(cells), flush=True)
            yield seconds


def evaluated(
    rounds: list[dict[str, list[float]]], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Throughputs and their ratios, from the seconds of each round's turns."""
    size = MODELS[settings["model"]]
    tokens = settings["prompts"] * settings["prompt_len"]
    row_bytes = 2 * size["hidden_size"]
    totals = [{name: sum(both) for name, both in each.items()} for each in rounds]

    def speed(name: str, amount: int) -> dict[str, Any]:
        return reports.summary([2 * amount / each[name] for each in totals])

    rows = tokens * size["num_hidden_layers"]
    return {
        "tokens_per_second": {name: speed(name, tokens) for name in TURNS},
        "rows_per_second": speed("captured", rows),
        "bytes_per_second": speed("captured", rows * row_bytes),
        "ratio": {
            name: reports.summary([each[base] / each[which] for each in totals])
            for name, (which, base) in RATIOS.items()
        },
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Start the processes one after the other, measure, stop them."""
    WORK.mkdir(parents=True, exist_ok=True)
    names = ("model", "device", "prompt_len", "prompts", "memory", "eager")
    settings = {name: getattr(options, name) for name in (*names, "staging_mib")}
    settings["stage_rounds"] = 5 if options.quick else 15
    fork_path = f"{options.fork}:{plug_in(WORK / 'plugin')}"
    report = {**reports.begun(), "model": describe(options.model), "load": settings}
    load_before = os.getloadavg()

    stages = Side(options.fork_python, fork_path, "stages", settings)
    report |= {"gpu": reports.ask_gpu("name"), "about": stages.about}
    samples = stages.ask("measure")
    stages.close()
    report["stages"] = {name: reports.summary(each) for name, each in samples.items()}
    report["stage_samples"] = samples
    print_stages(report)

    upstream = Side(options.upstream_python, options.upstream, "upstream", settings)
    fork = Side(options.fork_python, fork_path, "fork", settings)
    if upstream.about["has_capture"] or not fork.about["has_capture"]:
        raise RuntimeError(f"not as named: {upstream.about}, {fork.about}")
    sides = {"upstream": upstream, "fork": fork}
    report["start"] = {name: side.start() for name, side in sides.items()}
    rounds = []
    for seconds in take_turns(upstream, fork, settings, options.rounds):
        rounds.append(seconds)
        report |= {"machine": reports.machine(load_before), "rounds": rounds}
        report |= evaluated(rounds, settings)
        reports.save(report, options.out)  # in case it is cut short
    for name, side in sides.items():
        report["start"][name] |= side.ask("memory")
        side.close()
    return report


def print_stages(report: Mapping[str, Any]) -> None:
    """GB/s of each stage."""
    for name, one in report["stages"].items():
        print(f"{name:<46}{_cell(one, 1e-9):>26} GB/s", flush=True)


def print_engines(report: Mapping[str, Any]) -> None:
    """Throughputs and ratios."""
    reports.print_starts(report["start"])
    for name, one in report["tokens_per_second"].items():
        print(f"{name:<46}{_cell(one, 1e-3):>26} thousand tokens/s")
    print(f"{'rows':<46}{_cell(report['rows_per_second'], 1e-6):>26} million/s")
    print(f"{'bytes':<46}{_cell(report['bytes_per_second'], 1e-9):>26} GB/s")
    for name, one in report["ratio"].items():
        print(f"{'throughput, ' + name:<46}{_cell(one, 1):>26}")


def _cell(one: Mapping[str, float], scale: float) -> str:
    median, low, high = (
        one[each] * scale for each in ("median", "smallest", "largest")
    )
    return f"{median:.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    """Parse the command line, measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fork", help="PYTHONPATH of the fork")
    parser.add_argument("--upstream", help="PYTHONPATH of upstream")
    parser.add_argument("--fork-python", type=Path, default=Path(sys.executable))
    parser.add_argument("--upstream-python", type=Path, default=Path(sys.executable))
    parser.add_argument("--model", choices=MODELS, default="1b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--prompt-len", type=int, default=4096)
    parser.add_argument("--prompts", type=int, default=16, help="in one turn")
    parser.add_argument("--rounds", type=int, help="default 12; 4 with --quick")
    parser.add_argument("--memory", type=float, default=0.4, help="of the GPU, a side")
    parser.add_argument("--staging-mib", type=int, help="default: the engine's")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--quick", action="store_true", help="about 3 minutes")
    parser.add_argument("--out", type=Path, default=WORK / "bandwidth.json")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options.child[0], json.loads(options.child[1]))
        return
    if not options.fork or not options.upstream:
        parser.error("--fork and --upstream are needed")
    if options.rounds is None:
        options.rounds = 4 if options.quick else 12
    report = run(options)
    print_engines(report)
    reports.write(report, options.out)


if __name__ == "__main__":
    main()
