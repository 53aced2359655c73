# SPDX-License-Identifier: Apache-2.0
"""Claim: what interventions, rows and readouts cost over several GPUs, per token.

    python benchmarks/ranks.py --sides upstream=PATH fork=PATH [other=PATH ...] \
        [--tensor-parallel 2] [--pipeline-parallel 1] [--data-parallel 1] \
        [--cases layers lens] [--rounds 3] [--out ranks.json]

Each side is an engine over the same GPUs, in a process with PYTHONPATH set to a folder
(or several, separated by colons) that has its `vllm`. The first is the baseline: it
computes the plain batch, also if it is upstream; alone, it is compared with itself, for
models of which two do not fit. All take turns with a batch of 32 requests for each
data-parallel engine, whose prompts have 256 tokens. What is compared is the median time
of the steps that make a token of each request, as the caller sees it, while all of them
generate; of data-parallel engines the time of the whole batch, with prompts and rows. A
figure is the ratio to the mean of the turns of the baseline directly before and after
it; the first round warms up and is not counted. Rows are returned to the caller.
Weights are random.
`--device cpu --model tiny --eager` runs without a GPU.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
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
from benchmarks.harness.readout_sides import write_modules  # noqa: E402

WORK = ROOT / "build" / "benchmarks" / "ranks"
REQUESTS, PROMPT = 32, 256
TOKENS = 320
"""Tokens that each request generates."""
AT_START, AT_END = 24, 8
"""Steps of a batch that are not timed: those with prompts and with ends."""
SPAN = 16
"""Consecutive steps that are timed together: those of several batches in flight."""
VECTORS = 16
"""Distinct configurations of vectors in a batch."""

Fields = dict[str, Any]
"""Fields of a request's `SamplingParams`."""


def fields_by_case(model: str) -> dict[str, Callable[[int], Fields]]:
    """By case: the fields of the batch's request of each number."""
    import numpy as np

    layers, width = MODELS[model]["num_hidden_layers"], MODELS[model]["hidden_size"]
    draw = np.random.default_rng(0)
    vectors = draw.standard_normal((VECTORS, width)).astype(np.float32) / 64
    middle = layers * 3 // 8

    def rows(chosen: Any) -> Fields:
        spec = {"hooks": {"post_block": chosen}, "positions": "all_generated"}
        return {"capture": {"inline": spec}}

    def steers(number: int, chosen: range, **entry: Any) -> Fields:
        vector = vectors[number % VECTORS]
        at = {str(layer): {"vector": vector, **entry} for layer in chosen}
        return {"steering_vectors": {"post_block": at}}

    def lens() -> Fields:
        return {"readouts": {"lens": {"kind": "lens", "layers": "all", "top_k": 5}}}

    every, one = range(layers), range(middle, middle + 1)
    removal = {"op": "project_out"}
    sae = {"kind": "sae", "sae": "features", "top_k": 32}
    return {
        "plain": lambda number: {},
        "one layer captured": lambda number: rows([middle]),
        "all layers captured": lambda number: rows("all"),
        f"{VECTORS} vectors, all layers": lambda number: steers(number, every),
        "project out, all layers": lambda number: steers(0, every, **removal),
        "project out, one layer, 1 of 32": lambda number: (
            {} if number else steers(0, one, **removal)
        ),
        "SAE of 65,536 features": lambda number: {"readouts": {"sae": sae}},
        "lens, all layers, 1 of 32": lambda number: {} if number else lens(),
        "lens, all layers, 8 of 32": lambda number: lens() if number < 8 else {},
        "all of it": lambda number: {
            **steers(number, every, **(removal if number % 2 else {})),
            **(lens() if number < 8 else {}),
            **rows("all"),
        },
    }


class Engine:
    """An engine in the child process."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Start it; the fork has all features."""
        import importlib.util

        self.is_fork = importlib.util.find_spec("vllm.v1.capture") is not None
        chosen: dict[str, Any] = {}
        if settings["device"] == "cuda":
            # Sides start concurrently, so free memory cannot be measured.
            chosen["kv_cache_memory_bytes"] = int(settings["kv_gib"] * (1 << 30))
            chosen["gpu_memory_utilization"] = 0.3
        if self.is_fork:
            if settings["sae"]:  # 2 GB of weights.
                self._folder = tempfile.TemporaryDirectory()
                write_modules(Path(self._folder.name), settings["model"])
                chosen["sae"] = {"features": f"{self._folder.name}/sae"}
            chosen |= {
                "capture_consumers": ["inline"],
                "enable_readouts": True,
                "enable_steering": True,
                "max_steering_configs": VECTORS,
            }
            if settings["device"] == "cuda":
                chosen["capture_staging_bytes"] = 2 << 30
        stages = settings["pipeline_parallel"]
        chosen |= {
            "model": model_folder(settings["model"]),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "tensor_parallel_size": settings["tensor_parallel"],
            "pipeline_parallel_size": stages,
            "enforce_eager": settings["eager"],
            "max_model_len": 1024,
            "max_num_seqs": REQUESTS,
            # The batches that pipeline stages have in flight get as many prompts each.
            "max_num_batched_tokens": REQUESTS * PROMPT // stages,
            "enable_prefix_caching": False,
            "disable_log_stats": True,
            "seed": 0,
        }
        self._engines = settings["data_parallel"]
        self._cases = fields_by_case(settings["model"])
        begin = time.perf_counter()
        if self._engines > 1:
            self._loop = asyncio.new_event_loop()
            self._async = self._loop.run_until_complete(self._started(chosen))
        else:
            from vllm import LLM

            self._llm = LLM(**chosen)
        self.start_seconds = time.perf_counter() - begin

    async def _started(self, chosen: dict[str, Any]) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(**chosen, data_parallel_size=self._engines)
        return AsyncLLM.from_engine_args(arguments)

    def seconds(self, case: str) -> float:
        """Seconds for a token of each request."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        prompts: Any = [
            {"prompt_token_ids": [(7 * i + 13 * j) % 31000 + 8 for j in range(PROMPT)]}
            for i in range(REQUESTS * self._engines)
        ]
        params = [
            SamplingParams(
                max_tokens=TOKENS,
                temperature=0.0,
                detokenize=False,
                ignore_eos=True,
                # Otherwise rows are returned with each token too.
                output_kind=RequestOutputKind.FINAL_ONLY,
                **self._cases[case](number // self._engines),
            )
            for number in range(len(prompts))
        ]
        if self._engines > 1:
            return self._loop.run_until_complete(self._answered(case, prompts, params))
        engine = self._llm.llm_engine
        step, times = engine.step, []

        def timed() -> Any:
            outputs = step()
            times.append(time.perf_counter())
            return outputs

        engine.step = timed
        try:
            self._check(case, self._llm.generate(prompts, params, use_tqdm=False))
        finally:
            del engine.step  # Its class has the method.
        own = times[AT_START:-AT_END]
        spans = [after - before for before, after in zip(own, own[SPAN:])]
        # Each of several batches in flight has steps of its own.
        return statistics.median(spans) / SPAN * len(times) / TOKENS

    async def _answered(self, case: str, prompts: Any, params: Any) -> float:
        """The same for data-parallel engines: of whole requests, with their prompts."""

        async def one(number: int) -> Any:
            outputs = self._async.generate(
                prompts[number],
                params[number],
                f"{case} {time.monotonic_ns()} {number}",
                data_parallel_rank=number % self._engines,
            )
            return [output async for output in outputs][-1]

        begin = time.perf_counter()
        outputs = await asyncio.gather(*map(one, range(len(prompts))))
        spent = time.perf_counter() - begin
        self._check(case, outputs)
        return spent / TOKENS

    def _check(self, case: str, outputs: list[Any]) -> None:
        """Nothing may be missing, or less work is timed."""
        captures = "captured" in case or case == "all of it"
        for output in outputs if captures else ():
            if output.capture_results["inline"].status != "ok":
                raise RuntimeError(str(output.capture_results["inline"]))


class Side(Child):
    """The parent's side of an engine."""

    def __init__(self, name: str, path: str, settings: Mapping[str, Any]) -> None:
        """Start it with this PYTHONPATH; `answer` waits for it."""
        environment = {**os.environ, **ENVIRONMENT}
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        if path:
            environment["PYTHONPATH"] = path
        command = [sys.executable, __file__, "--child", json.dumps(settings)]
        self.name = name
        super().__init__(command, WORK / f"{name}.log", environment)

    def seconds(self, case: str) -> float:
        """Seconds for a token of each request.

        Raises:
            RuntimeError: the case failed.

        """
        found = self.ask(case)
        if isinstance(found, dict):
            raise RuntimeError(f"{self.name}, {case}: {found['error']}")
        return float(found)


def child(settings: dict[str, Any]) -> None:
    """Serve the parent's requests: names of cases."""
    answer = answers()
    engine = Engine(settings)
    answer({"is_fork": engine.is_fork, "start_seconds": engine.start_seconds})
    for case in requests():
        try:
            answer(engine.seconds(case))
        except Exception as error:  # A failed case must not end the others.
            answer({"error": f"{type(error).__name__}: {error}"})


def measure(base: Side, sides: list[Side], cases: list[str], report: Fields) -> None:
    """One round: every case of every side, between two turns of the baseline."""
    before = base.seconds("plain")
    for case in cases:
        for side in sides:
            try:
                own = side.seconds(case)
            except RuntimeError as error:
                report["errors"][f"{side.name}: {case}"] = str(error)
                print(f"  {error}", flush=True)
                continue
            after = base.seconds("plain")
            plain, before = (before + after) / 2, after
            report["samples"].setdefault(side.name, {}).setdefault(case, []).append(
                plain / own
            )
            report["plain_ms"].append(1e3 * plain)
            ratio = f"{plain / own:.4f} (of {1e3 * plain:.3f} ms)"
            print(f"  {side.name:10} {case:32} {ratio}", flush=True)


def run(options: argparse.Namespace) -> None:
    """Start all sides and measure round by round."""
    begin, load = time.perf_counter(), os.getloadavg()
    wanted = options.cases or [""]
    cases = [
        case
        for case in fields_by_case(options.model)
        if case == "plain" or any(text in case for text in wanted)
    ]
    report: Fields = {
        "kind": "ranks",
        **reports.begun(),
        "gpu": reports.ask_gpu("name"),
        "model": describe(options.model),
        "tensor_parallel": options.tensor_parallel,
        "pipeline_parallel": options.pipeline_parallel,
        "data_parallel": options.data_parallel,
        "samples": {},
        "plain_ms": [],
        "errors": {},
    }
    names = ["model", "device", "eager", "kv_gib"]
    names += ["tensor_parallel", "pipeline_parallel", "data_parallel"]
    settings = {name: getattr(options, name) for name in names}
    settings["sae"] = any("SAE" in case for case in cases)
    with ExitStack() as running:
        base, *sides = [
            running.enter_context(Side(*text.split("=", 1), settings))
            for text in options.sides
        ]
        report["sides"] = {side.name: side.answer() for side in (base, *sides)}
        print(f"started after {time.perf_counter() - begin:.0f} s", flush=True)
        print(report["sides"], flush=True)
        for number in range(options.rounds + 1):
            if number > 1 and time.perf_counter() - begin > options.seconds:
                break
            print(f"round {number}" if number else "warm-up", flush=True)
            measure(base, sides or [base], cases, report)
            if number == 0:
                report["samples"].clear()
            report["rounds"] = number
            reports.save(report, options.out)
    report["machine"] = reports.machine(load)
    report["cases"] = {
        name: {case: reports.summary(ratios) for case, ratios in of_side.items()}
        for name, of_side in report["samples"].items()
    }
    for name, of_side in report["cases"].items():
        for case, found in of_side.items():
            print(f"{name:10} {case:32} {found['median']:.4f} {found['interval']}")
    reports.write(report, options.out)


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--sides", nargs="+", default=["first=", "second="], help="NAME=PYTHONPATH"
    )
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--tensor-parallel", type=int, default=2)
    parser.add_argument("--pipeline-parallel", type=int, default=1)
    parser.add_argument("--data-parallel", type=int, default=1)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--cases", nargs="+", help="only those whose names hold these")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=360, help="no round begins after these"
    )
    parser.add_argument("--kv-gib", type=float, default=4.0, help="of each rank")
    parser.add_argument("--out", type=Path, default=WORK / "ranks.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(json.loads(options.child))
        return
    run(options)


if __name__ == "__main__":
    main()
