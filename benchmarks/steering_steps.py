# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of steering per decode step, also on a busy machine.

    python benchmarks/steering_steps.py    about 5 minutes on idle cores

One engine with steering runs batches of 16 requests: each at one layer, or each at all
layers and hook points with its own configuration; further modes use other operations:
those such as "one clamps at all layers" show what one request costs the others. The
figure of a round is the median CPU time of a step over that of two batches beside it
that nobody steers. HTTP and other processes of a server are not included.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for `benchmarks`

from benchmarks.harness import reports  # noqa: E402
from benchmarks.harness.child import Child, answers, requests  # noqa: E402
from benchmarks.harness.models import random_llama, random_prompts  # noqa: E402
from benchmarks.harness.served import ENVIRONMENT  # noqa: E402

WORK = ROOT / "build" / "benchmarks"
TARGETS = {
    "one": 1.015,
    "all": 1.06,
    "one clamps at all layers": 1.02,
    "one projects at all layers": 1.02,
    "one norm-matches at all layers": 1.02,
    "one replaces at all layers": 1.02,
    "all project at one layer": 1.02,
    "all project at all layers": 1.06,
    "all project at all points, 16 configs": 1.15,
    "all norm-match at one layer": 1.02,
}
"""CPU time of a decode step over that of a batch that nobody steers, at most."""
LAYERS, WIDTH, CONFIGS = 12, 768, 16
STEPS = 100
HOOKS = ("pre_attn", "post_attn", "post_block")


def write_modules(folder: Path) -> dict[str, Path]:
    """Named vectors: one layer, and 16 times all layers at all hook points."""
    from vllm.v1.steering.spec.files import save_module

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


def operations(mode: str, number: int) -> Any:
    """The operations of a request of the batch in modes without named vectors."""
    draw = random.Random(number if mode.endswith("configs") else 0)
    vector = [draw.gauss(0, 1) for _ in range(WIDTH)]
    clamp: dict[str, Any] = {"op": "clamp", "min": 1.0, "max": 1.0}
    project: dict[str, Any] = {"op": "project_out", "scale": 0.1}
    match: dict[str, Any] = {"norm_match": True, "scale": 0.01}
    replace: dict[str, Any] = {"op": "replace", "positions": [3, 4, 40, 80]}
    kinds = {"clamp": clamp, "project": project, "norm-": match, "replace": replace}
    of_one, _, rest = mode.partition(" ")
    found = [kind for name, kind in kinds.items() if rest.startswith(name)]
    if not found or (of_one == "one" and number):
        return None
    entry = {"vector": vector, **found[0]}
    layers = range(LAYERS) if "all" in rest else [LAYERS // 2]
    hooks = HOOKS if "points" in rest else ("post_block",)
    return {hook: dict.fromkeys(layers, entry) for hook in hooks}


class Engine(Child):
    """A process with an engine.

    A request is a mode's name, which adds a batch, or `step`, or `finish` to run the
    remaining steps; the answer is CPU seconds.
    """

    def __init__(self, model: Path, modules: dict[str, Path]) -> None:
        environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1"}
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        given = {name: str(path) for name, path in modules.items()}
        super().__init__(
            [sys.executable, __file__, "--serve", model, json.dumps(given)],
            WORK / "steering_steps.log",
            environment,
        )
        self.answer()


def serve(model: str, modules: dict[str, str]) -> None:
    """The child's side."""
    answer = answers()
    from vllm import LLM, SamplingParams

    engine = LLM(
        model,
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=32,
        enable_prefix_caching=False,
        distributed_executor_backend="uni",
        enable_steering=True,
        max_steering_configs=CONFIGS,
        steering_modules=modules,
    ).llm_engine
    added = 0
    answer("ready")
    for what in requests():
        before = time.process_time()
        if what == "step":
            engine.step()
        elif what == "finish":
            while engine.has_unfinished_requests():
                engine.step()
        else:
            for i, prompt in enumerate(random_prompts(CONFIGS, 32, 32)):
                named = {"one": "one", "all": f"all{i}"}.get(what)
                params = SamplingParams(
                    temperature=0,
                    ignore_eos=True,
                    max_tokens=STEPS + 20,
                    detokenize=False,
                    **({"steering_name": named} if named else {}),
                    steering_vectors=operations(what, i),
                )
                added += 1
                engine.add_request(str(added), {"prompt_token_ids": prompt}, params)
        answer(time.process_time() - before)


def within(engine: Engine, mode: str) -> float:
    """The median step's CPU time over that of the engine's idle batches beside it."""
    found = []
    for each in ("idle", mode, "idle"):
        engine.ask(each)
        times = [engine.ask("step") for _ in range(STEPS)]
        engine.ask("finish")
        found.append(statistics.median(times[5:]))
    return found[1] / statistics.fmean(found[::2])


def main() -> int:
    """Measure and report; returns 1 if a cost exceeds its goal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--only", nargs="*", help="modes whose names hold one of these")
    parser.add_argument("--out", type=Path, default=WORK / "steering_steps.json")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve[0], json.loads(options.serve[1]))
        return 0
    head, load_before = reports.begun(), os.getloadavg()
    modes = [one for one in TARGETS if any(p in one for p in options.only or [""])]
    model = random_llama(WORK / "models", LAYERS, WIDTH).folder
    modules = write_modules(WORK / "modules")
    taken: dict[str, list[float]] = {mode: [] for mode in modes}
    with Engine(model, modules) as engine:
        within(engine, "idle")  # Warms up.
        for number in range(options.rounds):
            for mode, ratios in taken.items():
                ratios.append(within(engine, mode))
                print(f"{number + 1}, {mode}: {ratios[-1]:.4f}", flush=True)
    of_modes = {mode: reports.summary(ratios) for mode, ratios in taken.items()}
    head["machine"] = reports.machine(load_before)
    report = {**head, "within": of_modes, "rounds": taken}
    for mode, each in of_modes.items():
        interval = "{:.4f} to {:.4f}".format(*each["interval"])
        print(f"{mode:<36} {each['median']:.4f} ({interval}), {TARGETS[mode]}")
    reports.write(report, options.out)
    return 0 if all(of_modes[m]["median"] <= TARGETS[m] for m in of_modes) else 1


if __name__ == "__main__":
    sys.exit(main())
