# SPDX-License-Identifier: Apache-2.0
"""GPU time of one decode step, fork against upstream, by replaying recorded graphs.

    python benchmarks/decode_step.py --fork FORK_PATH --upstream UPSTREAM_PATH \
        [--model 1b|8b] [--variants off,capture,...] [--out results.json]

Each variant runs in a process of its own, with PYTHONPATH set to the folder (or
folders, separated by colons) that holds its `vllm`. Weights are random; the 1B-class
model has 16 layers of width 2048, the 8B-class one 32 of 4096. A figure is the median
of seven measurements of 100 replays between two CUDA events; all ratios are to
upstream in the same run. Also compares the greedy tokens of all variants. Results are
written after each variant, so that a run that is cut short keeps what it has.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

MODELS = {
    "tiny": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4},
    "1b": {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16},
    "8b": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
}
BATCHES = (1, 8, 32, 128, 256)
VARIANTS = {
    "off": "",
    "capture": "capture",
    "steering": "steering",
    "both": "capture steering",
}
"""The fork's, by the features that are on."""
ALL_HOOKS = ("pre_attn", "post_attn", "post_block")


def model_folder(name: str) -> str:
    """A folder with the configuration of a Llama that needs no weights."""
    size = MODELS[name]
    folder = Path(tempfile.gettempdir()) / f"decode-step-{name}"
    folder.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 32000,
        "intermediate_size": int(size["hidden_size"] * 3.5),
        "num_key_value_heads": 8 if size["hidden_size"] > 256 else 4,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **size,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def measure(model: str, features: str) -> dict[str, object]:
    """Start an engine and time its graphs; runs in the variant's own process."""
    import time

    import torch

    from vllm import LLM, SamplingParams

    extra: dict[str, object] = {}
    if "capture" in features:
        extra["capture_consumers"] = ["logging"]
    if "steering" in features:
        extra["enable_steering"] = True
        extra["max_steering_configs"] = 16
    start = time.perf_counter()
    llm = LLM(
        model=model_folder(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=2048,
        max_num_seqs=256,
        gpu_memory_utilization=0.6,
        compilation_config={"cudagraph_capture_sizes": list(BATCHES)},
        **extra,
    )
    started = time.perf_counter() - start
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    generator = torch.Generator().manual_seed(5)
    prompts = [
        {"prompt_token_ids": torch.randint(32000, (20,), generator=generator).tolist()}
        for _ in range(16)
    ]
    outputs = llm.generate(
        prompts,
        SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, detokenize=False),
        use_tqdm=False,
    )
    graphs = {
        (desc.num_tokens, getattr(desc, "tapped", 0)): graph
        for desc, graph in runner.cudagraph_manager.graphs.items()
        if desc.uniform_token_count == 1
    }
    times: dict[str, dict[int, float]] = {"plain": {}}
    for batch in BATCHES:
        times["plain"][batch] = replay_ms(graphs[batch, 0])
    if "capture" in features:
        time_taps(runner, graphs, times)
    if "steering" in features:
        time_steering(runner, graphs, times)
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "times": times,
        "start_seconds": started,
        "memory": torch.cuda.memory_stats()["reserved_bytes.all.peak"],
    }


def time_taps(runner, graphs, times) -> None:  # type: ignore[no-untyped-def]
    """The tapped graphs with no row, and with every row of several sets of taps."""
    capture = runner.residual._capture
    columns = capture._columns
    layers = sorted({layer for layer, _ in columns})
    middle = layers[len(layers) // 2]
    cases = {
        "tapped, idle": [],
        "one layer": [columns[middle, "post_block"]],
        "all layers, post_block": [columns[layer, "post_block"] for layer in layers],
        "all layers, 3 hooks": [
            columns[layer, hook] for layer in layers for hook in ALL_HOOKS
        ],
    }
    import torch

    for name, taps in cases.items():
        times[name] = {}
        for batch in BATCHES:
            capture._slots.fill_(-1)
            if taps:
                rows = torch.arange(batch * len(taps), dtype=torch.int32)
                rows = rows.remainder(capture._staging.rows.shape[0])
                rows = rows.view(batch, len(taps)).to(capture._slots.device)
                capture._slots[:batch, taps] = rows
            family = 2 if "3 hooks" in name else 1
            times[name][batch] = replay_ms(graphs[batch, family])
    capture._slots.fill_(-1)


def time_steering(runner, graphs, times) -> None:  # type: ignore[no-untyped-def]
    """Every row steered at all hook points, rows of the tables at random."""
    import torch

    taps = [
        tap
        for module in runner.model.modules()
        for tap in (module.__dict__.get("residual_taps") or {}).values()
    ]
    rows = taps[0].rows
    num_vectors = taps[0].table.shape[0]
    rows.copy_(torch.randint(1, num_vectors, rows.shape, dtype=rows.dtype))
    for tap in taps:
        tap.table.normal_(0, 1e-3)
    name = f"steered, all hooks, {num_vectors - 1} vectors"
    times[name] = {batch: replay_ms(graphs[batch, 0]) for batch in BATCHES}
    rows.zero_()
    for tap in taps:
        tap.table.zero_()


def replay_ms(graph) -> float:  # type: ignore[no-untyped-def]
    """Milliseconds of one replay."""
    import torch

    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    samples = []
    for _ in range(7):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(100):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) / 100)
    return statistics.median(samples)


def run_variant(path: str, model: str, features: str) -> dict[str, object]:
    """Measure one variant in a fresh process."""
    with tempfile.NamedTemporaryFile(suffix=".json") as result:
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
        }
        command = [sys.executable, __file__, "--measure", features]
        command += ["--model", model, "--out", result.name]
        log = tempfile.gettempdir() + "/decode_step.log"
        with open(log, "a") as output:
            subprocess.run(
                command, env=environment, check=True, stdout=output, stderr=output
            )
        return json.loads(Path(result.name).read_text())  # type: ignore[no-any-return]


def main() -> None:
    """Parse the command line, run the variants, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fork")
    parser.add_argument("--upstream")
    parser.add_argument("--model", choices=MODELS, default="1b")
    parser.add_argument("--measure")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--out", type=Path, default=Path("decode_step.json"))
    args = parser.parse_args()
    if args.measure is not None:
        args.out.write_text(json.dumps(measure(args.model, args.measure)))
        return
    runs: dict[str, dict[str, object]] = {}
    for name in ["upstream", *args.variants.split(","), "upstream again"]:
        path = args.upstream if name.startswith("upstream") else args.fork
        runs[name] = run_variant(path, args.model, VARIANTS.get(name, ""))
        args.out.write_text(json.dumps(runs, indent=1))
        print_variant(name, runs[name], runs["upstream"])


def print_variant(name: str, run: dict[str, object], base: dict[str, object]) -> None:
    """Milliseconds of a decode step, and in brackets the ratio to upstream."""
    same = run["tokens"] == base["tokens"]
    print(
        f"{name}: start {run['start_seconds']:.1f} s, peak memory "
        f"{run['memory'] / 2**20:.0f} MiB, same tokens as upstream: {same}"  # type: ignore[operator]
    )
    for case, by_batch in run["times"].items():  # type: ignore[attr-defined]
        cells = []
        for batch, ms in by_batch.items():
            plain = base["times"]["plain"][batch]  # type: ignore[index]
            cells.append(f"{batch}: {ms:.4f} ({ms / plain:.4f})")
        print(f"  {case:24s} " + "  ".join(cells), flush=True)


if __name__ == "__main__":
    main()
