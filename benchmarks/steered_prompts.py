# SPDX-License-Identifier: Apache-2.0
"""Claim: prompts steered at all layers keep 0.95 of upstream's throughput.

    python benchmarks/steered_prompts.py --fork FORK_PATH --upstream UPSTREAM_PATH \
        [--model 8b] [--cases rotate feature] [--rounds 5] [--out steered_prompts.json]

Two engines, each in a process with PYTHONPATH set to the folder (or folders, separated
by colons) that has its `vllm`, start together and take turns with the same 8 prompts of
4,096 tokens. In each case all requests name a module with one operation of the entry
format at `post_block` of every layer, and `feature` at the layer of its SAE. Each turn
is measured between two of upstream's, and its ratio is to their mean; the first round
warms up and is not counted. Without `--upstream` the fork without interventions takes
its place. Weights are random.

Each figure is printed as it is measured, and the report is written after each round.
`--device cpu --model tiny --eager` runs without a GPU.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
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
from benchmarks.harness.llamas import MODELS, describe, model_folder  # noqa: E402

WORK = ROOT / "build" / "benchmarks" / "steered_prompts"
REQUESTS, PROMPT = 8, 4096
PLAIN = "no interventions"
FEATURE = "feature"
CASES = (
    PLAIN,
    "add",
    "norm_match",
    "project_out",
    "clamp",
    "replace",
    "swap",
    "rotate",
    "low_rank",
    FEATURE,
)


def entry_of(case: str, width: int) -> dict[str, Any]:
    """The entry of a case, weak enough that the stream stays finite."""
    import numpy as np

    draw = np.random.default_rng(CASES.index(case))

    def rows(count: int) -> Any:
        return draw.standard_normal((count, width)).round(4).tolist()

    [vector] = rows(1)
    fields: dict[str, dict[str, Any]] = {
        "add": {"vector": vector, "scale": 0.001},
        "norm_match": {"vector": vector, "norm_match": True, "scale": 0.01},
        "project_out": {"op": "project_out", "vector": vector, "scale": 0.1},
        "clamp": {"op": "clamp", "vector": vector, "min": 1.0, "max": 1.0},
        "replace": {"op": "replace", "vector": vector, "alpha": 0.01},
        "swap": {"op": "swap", "vector": vector, "target": rows(1)[0]},
        "rotate": {"op": "rotate", "plane": rows(2), "degrees": 10.0},
        "low_rank": {
            "op": "low_rank",
            "read": rows(4),
            "write": rows(4),
            "activation": "relu",
            "scale": 1e-5,
        },
        FEATURE: {"op": "feature", "sae": "features", "feature": 7, "value": 3.0},
    }
    return fields[case]


class Engine:
    """An offline engine with dummy weights."""

    def __init__(self, role: str, settings: Mapping[str, Any]) -> None:
        """Start it; `on` has the modules of `settings["folder"]`."""
        from vllm import LLM

        chosen: dict[str, Any] = {"enforce_eager": settings["eager"]}
        if settings["device"] == "cuda":
            # Both start at once, so free memory cannot be measured.
            chosen["kv_cache_memory_bytes"] = int(settings["kv_gib"] * (1 << 30))
            chosen["gpu_memory_utilization"] = 0.4
        if role == "on":
            chosen |= modules(Path(settings["folder"]), settings["model"])
        self._llm = LLM(
            model=model_folder(settings["model"]),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=PROMPT + 16,
            max_num_seqs=REQUESTS,
            enable_prefix_caching=False,
            disable_log_stats=True,
            seed=0,
            **chosen,
        )

    def seconds(self, case: str = PLAIN) -> float:
        """Time the prompts, whose requests all name the module of the case."""
        from vllm import SamplingParams

        prompts: Any = [
            {"prompt_token_ids": [(7 * i + 13 * j) % 31000 + 8 for j in range(PROMPT)]}
            for i in range(REQUESTS)
        ]
        named = {} if case == PLAIN else {"steering_name": case}
        params = SamplingParams(
            max_tokens=1, temperature=0.0, detokenize=False, ignore_eos=True, **named
        )
        begin = time.perf_counter()
        self._llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - begin


def modules(folder: Path, model: str) -> dict[str, Any]:
    """Write a module for each case, and the SAE; arguments of the engine."""
    from benchmarks.harness.readout_sides import middle_layer, write_modules

    write_modules(folder, model)  # The SAE is among them.
    files = {}
    for case in CASES[1:]:
        layer = str(middle_layer(model)) if case == FEATURE else "all"
        entry = entry_of(case, MODELS[model]["hidden_size"])
        path = folder / f"{case}.json"
        path.write_text(json.dumps({"vectors": {"post_block": {layer: entry}}}))
        files[case] = str(path)
    return {
        "enable_steering": True,
        "max_steering_configs": 16,
        "steering_modules": files,
        "sae": {"features": str(folder / "sae")},
    }


def child(role: str, settings: dict[str, Any]) -> None:
    """Serve the parent's requests."""
    answer = answers()
    engine = Engine(role, settings)
    answer("ready")
    for case in requests():
        answer(engine.seconds(case))


def start(role: str, path: str, settings: Mapping[str, Any]) -> Child:
    """Start an engine's process; its first answer comes when it is ready."""
    environment = {**os.environ, **ENVIRONMENT}
    # The default for users: the engine core in its own process.
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    if path:
        environment["PYTHONPATH"] = path
    command = [sys.executable, __file__, "--child", role, json.dumps(settings)]
    return Child(command, WORK / f"{role}.log", environment)


def measure(off: Child, on: Child, chosen: Sequence[str]) -> dict[str, float]:
    """One round: the throughput of each case over that of its neighbouring turns."""
    found = {}
    before = off.ask(PLAIN)
    for case in chosen:
        own, after = on.ask(case), off.ask(PLAIN)
        found[case] = (before + after) / 2 / own
        print(f"  {case:20} {found[case]:.4f}  (upstream {after:.3f} s)", flush=True)
        before = after
    return found


def run(options: argparse.Namespace) -> None:
    """Start both engines and measure round by round."""
    begin, load = time.perf_counter(), os.getloadavg()
    report: dict[str, Any] = {
        "kind": "steered_prompts",
        **reports.begun(),
        "gpu": reports.ask_gpu("name"),
        "model": describe(options.model),
        "prompts": f"{REQUESTS} of {PROMPT} tokens",
        "upstream": bool(options.upstream),
        "rounds": [],
    }
    chosen = [case for case in CASES if case in (options.cases or CASES)]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        names = ("model", "device", "eager", "kv_gib")
        settings = {name: getattr(options, name) for name in names}
        settings["folder"] = folder
        base = options.upstream or options.fork
        off = running.enter_context(start("off", base, settings))
        on = running.enter_context(start("on", options.fork, settings))
        off.answer(), on.answer()
        print(f"started after {time.perf_counter() - begin:.0f} s", flush=True)
        measure(off, on, chosen)
        while len(report["rounds"]) < options.rounds:
            if time.perf_counter() - begin > options.seconds:
                break
            print(f"round {len(report['rounds']) + 1}", flush=True)
            report["rounds"].append(measure(off, on, chosen))
            report["cases"] = reports.summaries(report["rounds"])
            reports.save(report, options.out)
    report["machine"] = reports.machine(load)
    for name, found in report["cases"].items():
        print(f"{name:20} {found['median']:.4f} {found['interval']}")
    reports.write(report, options.out)


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fork", default="", help="PYTHONPATH of the fork")
    parser.add_argument("--upstream", default="", help="PYTHONPATH of upstream")
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--cases", nargs="+", choices=CASES, help="only these")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=300, help="no round begins after these"
    )
    parser.add_argument("--kv-gib", type=float, default=6.0, help="of each engine")
    parser.add_argument("--out", type=Path, default=WORK / "steered_prompts.json")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options.child[0], json.loads(options.child[1]))
        return
    run(options)


if __name__ == "__main__":
    main()
