# SPDX-License-Identifier: Apache-2.0
"""Claim: nnbench's cells cost little more than the plain passes that they contain.

    python benchmarks/nnbench/latency.py --fork FORK_PATH [--upstream UPSTREAM_PATH] \
        [--model 8b] [--rounds 5] [--out nnbench.json]

One prompt at a time on an idle engine, prefix cache off, as nnbench measures. Fork and
upstream have an engine each, in processes with PYTHONPATH set to the folder (or
folders, separated by colons) that has their `vllm`, and take turns. A figure is the
median time of a cell over that of upstream's plain generation in the turns directly
before and after it; the other prompt of a patch counts as a second generation. Weights
are random. `--device cpu --model tiny --eager` runs without a GPU.
"""

import argparse
import os
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # At the end, as the checkout has a folder `vllm` too.

from benchmarks.harness import reports  # noqa: E402
from benchmarks.harness.child import (  # noqa: E402
    ENVIRONMENT,
    Child,
    answers,
    requests,
)
from benchmarks.harness.llamas import MODELS, describe, model_folder  # noqa: E402

WORK = ROOT / "build" / "benchmarks" / "nnbench"
TOKENS = 8
"""That a cell generates, if it generates several."""
CELLS: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "plain": ("", {}, 1, 1),
    "plain, 8 tokens": ("", {}, TOKENS, 1),
    "logit lens, all layers": ("logit_lens", {}, 1, 1),
    "steer, mean norm": ("steering", {"scale_by": "mean_norm"}, 1, 1),
    "steer, token norm": ("steering", {"scale_by": "token_norm"}, 1, 1),
    "zero MLP at one layer": ("ablation", {"target": "mlp"}, 1, 1),
    "zero attention at one layer": ("ablation", {"target": "attn"}, 1, 1),
    "steer, 8 generated tokens": ("gen_steering", {"new_tokens": TOKENS}, TOKENS, 1),
    "patch last token": ("activation_patching", {"positions": "last"}, 1, 2),
    "patch all tokens": ("activation_patching", {"positions": "all"}, 1, 2),
}
"""By name: nnbench's cell, its options, tokens and prompts of plain generation."""
PROMPTS = [" ".join(f"w{offset + 7 * i}" for i in range(16)) for offset in (100, 900)]
REPEATS = 20


def with_tokenizer(model: str) -> str:
    """The model's folder, with a tokenizer of words `w0`, `w1`, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = model_folder(model)
    words = models.WordLevel({f"w{i}": i for i in range(32000)}, unk_token="w0")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


class Engine:
    """The fork's or upstream's engine in the child process."""

    def __init__(self, options: argparse.Namespace) -> None:
        from vllm import LLM, SamplingParams

        engine: dict[str, Any] = {
            "load_format": "dummy",
            "enable_prefix_caching": False,
            "enforce_eager": options.eager,
            "max_model_len": 1024,
        }
        if options.device == "cuda":
            engine |= {"gpu_memory_utilization": 0.4}
            engine |= {"kv_cache_memory_bytes": 2 << 30}
        folder = with_tokenizer(options.model)
        self.layers = MODELS[options.model]["num_hidden_layers"]
        if options.child == "fork":
            from benchmarks.nnbench import stand_ins

            modules = stand_ins.modules(700)
            sys.modules.update(modules)
            stand_ins.loaded("cells")
            self.cells = modules["isb.methodologies.registry"].cells
            self.backend = stand_ins.loaded("backend").ClearboxBackend(**engine)
            self.model = self.backend.load(folder)
            self.llm = self.model.llm
        else:
            self.llm = LLM(folder, **engine)
        self.params = SamplingParams

    def milliseconds(self, name: str) -> float:
        """The median of some repetitions."""
        cell, options, tokens, _ = CELLS[name]
        if cell:
            place = {"ablation": 1, "activation_patching": self.layers // 4}
            layer = {"layer": place.get(cell, self.layers // 2)}
            options = options if cell == "logit_lens" else options | layer
        found = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            if cell:
                self.cells[cell](self.backend, self.model, PROMPTS, **options)
            else:
                params = self.params(max_tokens=tokens, temperature=0.0)
                params.ignore_eos = True
                self.llm.generate(PROMPTS[:1], params, use_tqdm=False)
            found.append(time.perf_counter() - began)
        return 1e3 * statistics.median(found)


def child(options: argparse.Namespace) -> None:
    """Serve the parent's requests: names of cells."""
    answer = answers()
    engine = Engine(options)
    answer({})
    for name in requests():
        answer(engine.milliseconds(name))


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fork", default="", help="PYTHONPATH")
    parser.add_argument("--upstream", default="", help="PYTHONPATH")
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=WORK / "nnbench.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    load = os.getloadavg()
    sides = {}
    with ExitStack() as running:
        for name in ("upstream", "fork"):
            environment = {**os.environ, **ENVIRONMENT}
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
            if path := getattr(options, name):
                environment["PYTHONPATH"] = path
            command = [sys.executable, __file__, *sys.argv[1:], "--child", name]
            log = WORK / f"{name}.log"
            sides[name] = running.enter_context(Child(command, log, environment))
        for side in sides.values():
            side.answer()
        ratios: dict[str, list[float]] = {name: [] for name in CELLS}
        times: dict[str, list[float]] = {name: [] for name in CELLS}
        for number in range(options.rounds + 1):
            for name, (_, _, tokens, prompts) in CELLS.items():
                plain = "plain" if tokens == 1 else "plain, 8 tokens"
                before = sides["upstream"].ask(plain)
                own = sides["fork"].ask(name)
                after = sides["upstream"].ask(plain)
                if number:  # The first round warms up.
                    ratios[name].append(own / (prompts * (before + after) / 2))
                    times[name].append(own)
    report: dict[str, Any] = {
        **reports.begun(),
        "gpu": reports.ask_gpu("name"),
        "model": describe(options.model),
        "machine": reports.machine(load),
        "cells": {
            name: {"milliseconds": statistics.median(times[name])}
            | reports.summary(ratios[name])
            for name in CELLS
        },
    }
    for name, found in report["cells"].items():
        print(f"{name:30} {found['milliseconds']:8.2f} ms  {found['median']:.3f}")
    reports.write(report, options.out)


if __name__ == "__main__":
    main()
