# SPDX-License-Identifier: Apache-2.0
"""Claim: a patching sweep in one call is faster than hooks, one by one or batched.

    python benchmarks/patching.py [--model smollm2|8b|1b|tiny|PATH] [--positions 12]
        [--batches 8,32,100] [--slots 64,128] [--lens PYTHON] [--out patching.json]

Each side runs in its own process with the same token ids, which differ in the second
token: `ours`, the whole sweep of `vllm.patching` at `post_block`, with its clean run;
`loop`, a forward pass of Transformers with a hook for each cell; `batched`, the same
with one pass for many positions of a layer, at each of `--batches`; with `--lens`, the
Python of `python -m tests.interop.environment transformer_lens`, `lens 1`, which is
TransformerLens' `generic_activation_patch`, and `lens N`, its hooks with one pass for
the N positions of a layer. Passes of Transformers compute the logits of the last token
only. `ours` is the median of `--rounds` sweeps after one that warms up, with new
prompts each time, so that nothing is in the prefix cache. On a GPU the other sides run
a sample of the cells, after one that warms up, and seconds are scaled to all. Weights
of SmolLM2 are those of `examples/real_model`, in float32, and values of all sides are
compared; those of the Llamas are random and in bfloat16. The sides of a GPU need
its memory one at a time.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # At the end, as the checkout has a folder `vllm` too.

from benchmarks.harness import reports  # noqa: E402
from benchmarks.harness.llamas import MODELS, model_folder  # noqa: E402

ANSWER, FOIL = 7042, 4967
SAMPLE = 64
"""Cells that the loop runs on a GPU, and passes that batches run."""


def model_path(name: str) -> tuple[str, bool]:
    """The folder of a model, and whether its weights are random."""
    if name == "smollm2":
        sys.path.append(str(ROOT / "examples" / "real_model"))
        from convert import checkpoint

        return str(checkpoint()), False
    return (model_folder(name), True) if name in MODELS else (name, False)


def prompts(count: int, seed: int) -> tuple[list[int], list[int]]:
    """Two prompts that differ in the second token."""
    import numpy as np

    clean = np.random.default_rng(seed).integers(10, 30000, count).tolist()
    return clean, [clean[0], (clean[1] + 1) % 30000, *clean[2:]]


def ours(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of whole sweeps in one call."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    from vllm import LLM
    from vllm.patching import patch_sweep

    path, is_random = model_path(args.model)
    llm = LLM(
        path,
        skip_tokenizer_init=is_random,
        load_format="dummy" if is_random else "auto",
        dtype="bfloat16" if is_random else "float32",
        enable_patching=True,
        max_patch_slots=args.slot,
        max_num_seqs=max(args.slot, 128),
        max_model_len=2048,
    )
    seconds = []
    for seed in reversed(range(args.rounds + 1)):
        clean, corrupt = prompts(args.positions, seed)
        before = time.perf_counter()
        result = patch_sweep(
            llm, clean, corrupt, answer=ANSWER, foil=FOIL, progress=False
        )
        seconds.append(time.perf_counter() - before)
    values = result.values["post_block"]
    return {
        "seconds": statistics.median(seconds[1:]),
        "all": seconds[1:],
        "cells": values.size,
        "values": values.tolist(),
        "noise_floor": result.noise_floor,
    }


class Hooks:
    """A model of Transformers whose blocks' outputs are replaced."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        path, is_random = model_path(args.model)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        if is_random:
            torch.set_default_dtype(torch.bfloat16)
            with torch.device(self.device):
                config = AutoConfig.from_pretrained(path)
                self.model = AutoModelForCausalLM.from_config(config)
        else:
            self.model = AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32
            ).to(self.device)
        self.model.eval()
        self.layers = self.model.model.layers
        clean, corrupt = (
            torch.tensor([ids], device=self.device)
            for ids in prompts(args.positions, 0)
        )
        self.corrupt = corrupt
        with torch.no_grad():
            states = self.model(clean, output_hidden_states=True).hidden_states
        self.rows = [state[0] for state in states[1:]]
        # The library's last state is taken behind the final norm.
        kept: list[Any] = []
        handle = self.layers[-1].register_forward_hook(
            lambda _, __, out: kept.append(out[0] if isinstance(out, tuple) else out)
        )
        with torch.no_grad():
            self.model(clean)
        handle.remove()
        self.rows[-1] = kept[0][0]

    def run(self, layer: int, places: list[int]) -> Any:
        """Values of one layer's cells, float32 `[places]`, in one pass."""
        import torch

        def replace(_: Any, __: Any, out: Any) -> Any:
            stream = out[0] if isinstance(out, tuple) else out
            stream[range(len(places)), places] = self.rows[layer][places]
            return out

        handle = self.layers[layer].register_forward_hook(replace)
        with torch.no_grad():
            ids = self.corrupt.expand(len(places), -1)
            logits = self.model(ids, logits_to_keep=1).logits[:, -1].float()
        handle.remove()
        return (logits[:, ANSWER] - logits[:, FOIL]).cpu()


def hooks(args: argparse.Namespace, batch: int) -> dict[str, Any]:
    """Seconds of a sweep by hooks, with so many cells in a pass."""
    model = Hooks(args)
    count, places = len(model.layers), list(range(args.positions))
    groups = [places[n : n + batch] for n in range(0, len(places), batch)]
    passes = [(layer, group) for layer in range(count) for group in groups]
    sampled = passes
    if model.device == "cuda":
        sampled = passes[:: max(len(passes) // SAMPLE, 1)]
        model.run(*passes[0])
    values = [[float("nan")] * args.positions for _ in range(count)]
    before = time.perf_counter()
    for layer, group in sampled:
        for place, value in zip(group, model.run(layer, group).tolist(), strict=True):
            values[layer][place] = value
    taken = time.perf_counter() - before
    share = sum(len(g) for _, g in sampled) / (count * args.positions)
    return {"seconds": taken / share, "share": share, "values": values}


def lens(args: argparse.Namespace, batch: int) -> dict[str, Any]:
    """Seconds of a sweep of TransformerLens: its own, or batched by hand."""
    import torch
    from transformer_lens import patching
    from transformer_lens.model_bridge import TransformerBridge

    path, _ = model_path(args.model)
    model = TransformerBridge.boot_transformers(path, dtype=torch.float32, device="cpu")
    torch.set_grad_enabled(False)
    clean, corrupt = (torch.tensor([ids]) for ids in prompts(args.positions, 0))
    places = range(args.positions)

    def by_hand(layer: int) -> Any:
        name = f"blocks.{layer}.hook_resid_post"

        def patch(stream: Any, hook: Any) -> Any:
            stream[places, places] = cache[name][0, places]
            return stream

        rows = corrupt.expand(batch, -1)
        logits = model.run_with_hooks(rows, fwd_hooks=[(name, patch)])[:, -1]
        return logits[:, ANSWER] - logits[:, FOIL]

    before = time.perf_counter()
    _, cache = model.run_with_cache(clean)
    if batch == 1:
        values = patching.generic_activation_patch(
            model,
            corrupt,
            cache,
            lambda logits: logits[0, -1, ANSWER] - logits[0, -1, FOIL],
            patching.layer_pos_patch_setter,
            "resid_post",
            ("layer", "pos"),
        )
    else:
        values = torch.stack([by_hand(n) for n in range(model.cfg.n_layers)])
    return {"seconds": time.perf_counter() - before, "values": values.tolist()}


def child(args: argparse.Namespace, side: str, size: int) -> dict[str, Any]:
    """What a side has measured, in a process of its own."""
    python = args.lens if side == "lens" else sys.executable
    command = [python, __file__, "--side", side, "--slot", str(size)]
    for name in ("model", "positions", "rounds"):
        command += [f"--{name}", str(getattr(args, name))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr[-2000:]}
    lines = done.stdout.splitlines()  # An engine logs there, too.
    found: dict[str, Any] = json.loads(
        next(line for line in reversed(lines) if line.startswith('{"seconds"'))
    )
    return found


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of values that both sides have."""
    import numpy as np

    return float(np.nanmax(np.abs(np.array(one["values"]) - np.array(other["values"]))))


def main() -> None:
    """Run all sides, and print and write what they took."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--positions", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", default="8,32,100")
    parser.add_argument("--slots", default="64")
    parser.add_argument("--lens", metavar="PYTHON", help="with TransformerLens")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--slot", type=int, default=64, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side is not None:
        run = {"loop": hooks, "batched": hooks, "lens": lens}
        found = ours(args) if args.side == "ours" else run[args.side](args, args.slot)
        print(json.dumps(found), flush=True)
        return
    load = os.getloadavg()
    report: dict[str, Any] = {**reports.begun(), "model": args.model, "sides": {}}
    sides = [("ours", int(size)) for size in args.slots.split(",")]
    batches = {min(int(size), args.positions) for size in args.batches.split(",")}
    sides += [("loop", 1), *(("batched", size) for size in sorted(batches))]
    sides += [("lens", 1), ("lens", args.positions)] if args.lens else []
    first: dict[str, Any] = {}
    for side, size in sides:
        found = child(args, side, size)
        name = f"{side} {size}"
        if "error" in found:
            print(f"{name:12} failed: {found['error']}", flush=True)
            continue
        first = first or found
        rate = first["cells"] / found["seconds"]
        told = f"{name:12} {found['seconds']:8.2f} s  {rate:8.1f} cells/s"
        times = found["seconds"] / first["seconds"]
        told += f"  {times:6.2f} times the first side's time"
        if args.model not in MODELS:
            found["apart"] = apart(first, found)
            told += f", values differ by {found['apart']:.1e}"
        print(told, flush=True)
        report["sides"][name] = found
    report["machine"] = reports.machine(load)
    report["gpu"] = reports.ask_gpu("name")
    if args.out is not None:
        for found in report["sides"].values():
            del found["values"]
        reports.write(report, args.out)


if __name__ == "__main__":
    main()
