# SPDX-License-Identifier: Apache-2.0
"""Claim: with `keep_when` only interesting requests cost disk, and little time.

    python benchmarks/keep_when.py [--model 8b] [--rounds 3] [--requests 200 32]
        [--out keep_when.json]

One engine, which runs up to 128 requests at once, runs a batch of each size in turns:
`plain`; `read`, which computes the norm that decides; `request` and `token`, which
capture all positions at all layers to files where it fires, in one of 100 requests (at
least one), whole or with 8 tokens around; and `all`, which writes every row of the
first size. Requests generate 64 to 192 tokens, so that they end one after another as on
a server; with `--together` all generate 128. A ratio is to the mean of the `plain`
turns beside. Weights are random.
`--device cpu --model tiny --eager` runs without a GPU.
"""

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # At the end, as the checkout has a folder `vllm` too.

from benchmarks.harness import reports  # noqa: E402
from benchmarks.harness.llamas import MODELS, describe, model_folder  # noqa: E402

PROMPT, GENERATED, WINDOW = 128, 128, 8
FIRING = 100
"""One of so many requests fires."""
NORM = {"kind": "norm", "hooks": {"post_block": [1]}, "positions": "all"}
ROWS = {"hooks": {"post_block": "all"}, "positions": "all"}


class Engine:
    """An engine with files of rows in a temporary folder."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch

        from vllm import LLM

        self.folder = Path(tempfile.mkdtemp(dir=options.folder))
        self.layer = MODELS[options.model]["num_hidden_layers"] - 1
        draw = torch.Generator().manual_seed(5)
        size = max(options.requests), PROMPT
        self.prompts = torch.randint(1000, 30000, size, generator=draw).tolist()
        spread = 0 if options.together else GENERATED // 2
        few, most = GENERATED - spread, GENERATED + spread
        lengths = torch.randint(few, most + 1, size[:1], generator=draw)
        self.lengths: list[int] = lengths.tolist()
        self.llm = LLM(
            model_folder(options.model),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=PROMPT + most,
            max_num_seqs=128,
            enable_prefix_caching=False,
            enforce_eager=options.eager,
            enable_readouts=True,
            capture_consumers=[f"filesystem:root={self.folder}"],
        )

    def turn(self, mode: str, requests: int, bound: float = 0.0) -> dict[str, Any]:
        """Run a batch once."""
        from vllm import SamplingParams

        norm = NORM | {"hooks": {"post_block": [self.layer]}}
        keep = {"readout": "size", "above": bound, "scope": mode}
        if mode == "token":
            keep |= {"before": WINDOW, "after": WINDOW}
        spec = ROWS if mode == "all" else ROWS | {"keep_when": keep}
        params = [
            SamplingParams(
                max_tokens=length,
                ignore_eos=True,
                detokenize=False,
                temperature=0.0,
                readouts=None if mode in ("plain", "all") else {"size": norm},
                capture=None if mode in ("plain", "read") else {"filesystem": spec},
            )
            for length in self.lengths[:requests]
        ]
        prompts = [{"prompt_token_ids": ids} for ids in self.prompts[:requests]]
        began = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        results = [(one.capture_results or {}).get("filesystem") for one in outputs]
        assert all(one is None or one.status == "ok" for one in results)
        norms = [one.readouts["size"]["norm"].max() for one in outputs if one.readouts]
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        found = {
            "seconds": seconds,
            "bytes": sum(path.stat().st_size for path in files),
            "kept": sum(bool(one and one.kept) for one in results),
            "norms": sorted(map(float, norms)),
        }
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return found


def main() -> None:
    """Parse options, run, report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, nargs="+", default=[200, 32])
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--folder", type=Path, help="Where files are written.")
    parser.add_argument("--out", type=Path, default=Path("keep_when.json"))
    options = parser.parse_args()
    engine = Engine(options)
    first = options.requests[0]
    every = engine.turn("all", first)
    report: dict[str, Any] = {
        **reports.begun(),
        "gpu": reports.ask_gpu("name"),
        "model": describe(options.model),
        "together": options.together,
        "all": every,
    }
    print(f"all: {every['seconds']:.2f} s, {every['bytes']:,} bytes", flush=True)
    turns: dict[str, list[dict[str, Any]]] = {}
    for requests in options.requests:
        engine.turn("plain", requests)
        norms = engine.turn("read", requests)["norms"]
        firing = max(len(norms) // FIRING, 1)
        bound = sum(norms[-firing - 1 :][:2]) / 2
        for mode in ("request", "token"):  # Memory grows with the first of a kind.
            engine.turn(mode, requests, bound)
        before = engine.turn("plain", requests)["seconds"]
        for mode in ("read", "request", "token") * options.rounds:
            found = engine.turn(mode, requests, bound)
            after = engine.turn("plain", requests)["seconds"]
            found["ratio"] = (before + after) / 2 / found["seconds"]
            found["share"] = found["bytes"] * first / requests / every["bytes"]
            before = after
            turns.setdefault(f"{mode}, {requests}", []).append(found)
            print(
                f"{mode}: {found['ratio']:.3f} of plain, {found['kept']} of "
                f"{requests} kept, {found['share']:.4f} of the bytes",
                flush=True,
            )
    report["turns"] = turns
    for found in (every, *(one for each in turns.values() for one in each)):
        del found["norms"]
    for mode, each in turns.items():
        print(f"median {mode}: {median(one['ratio'] for one in each):.3f}", flush=True)
    reports.write(report, options.out)
    shutil.rmtree(engine.folder)


if __name__ == "__main__":
    main()
