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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODELS = {
    "tiny": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4},
    "1b": {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16},
    "8b": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
}
BATCHES = (1, 8, 32, 128, 256)
CONFIGS = 64
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
        extra["max_steering_configs"] = CONFIGS
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
    params = SamplingParams(
        temperature=0, max_tokens=48, ignore_eos=True, detokenize=False
    )
    made = list(cases(runner)) if features else []
    # After the graphs were recorded: recording leaves dummy lengths in the inputs,
    # and a replay computes on what it finds there.
    outputs = llm.generate(prompts, params, use_tqdm=False)
    times: dict[str, dict[int, float]] = {"plain": {}}
    plain = {
        desc.num_tokens: graph
        for desc, graph in runner.cudagraph_manager.graphs.items()
        if desc.uniform_token_count == 1 and not getattr(desc, "tapped", 0)
    }
    for batch in BATCHES:
        times["plain"][batch] = replay_ms(plain[batch])
    for case in made:
        times[case.name] = {}
        for batch in BATCHES:
            case.prepare(runner, batch)
            times[case.name][batch] = replay_ms(case.graphs[batch])
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "times": times,
        "start_seconds": started,
        "memory": torch.cuda.memory_stats()["reserved_bytes.all.peak"],
    }


@dataclass(frozen=True)
class Case:
    """What a step captures or steers, and the graphs that serve it."""

    name: str
    graphs: dict[int, Any]
    captured: list[Any] = field(default_factory=list)
    steered: list[Any] = field(default_factory=list)
    configs: int = 0

    def prepare(self, runner, batch) -> None:  # type: ignore[no-untyped-def]
        """Put into the memory that graphs read what a step would put there."""
        import torch

        capture, steering = runner.residual._capture, runner.residual.steering
        if capture is not None:
            capture._slots.fill_(-1)
            if self.captured:
                columns = [capture._columns[tap] for tap in self.captured]
                rows = torch.arange(batch * len(columns), dtype=torch.int32)
                rows = rows.remainder(capture._staging.rows.shape[0])
                rows = rows.view(batch, len(columns)).to(capture._slots.device)
                capture._slots[:batch, columns] = rows
        if steering is not None:
            steering.row_index.zero_()
            if self.steered:
                for tap in self.steered:
                    steering.tables.at(tap)[1:].normal_(0, 1e-3)
                generator = torch.Generator().manual_seed(7)
                steering.row_index.copy_(
                    torch.randint(
                        3,
                        3 + 2 * self.configs,
                        steering.row_index.shape,
                        dtype=torch.int32,
                        generator=generator,
                    )
                )


def cases(runner):  # type: ignore[no-untyped-def]
    """What the features do, in the graphs that serve such steps.

    Of steps that do little there are two kinds of graphs: those recorded when the
    engine starts, and those recorded once enough steps have wanted them.
    """
    capture, steering = runner.residual._capture, runner.residual.steering
    taps = sorted((capture or steering).addresses)
    layers = sorted({layer for layer, _ in taps})
    one = [(layers[len(layers) // 2], "post_block")]
    behind = [tap for tap in taps if tap[1] == "post_block"]
    at_start = ", in a graph of the start"

    def graphs(addresses, where, exact=True):  # type: ignore[no-untyped-def]
        ops = frozenset(addresses[tap] for tap in where)
        return {batch: graph_for(runner, batch, ops, exact) for batch in BATCHES}

    if capture is not None:
        known = capture.addresses
        yield Case("nothing captured" + at_start, graphs(known, behind))
        yield Case("one layer captured" + at_start, graphs(known, one, False), one)
        yield Case("one layer captured", graphs(known, one), one)
        yield Case("all layers captured", graphs(known, behind), behind)
        yield Case("all layers and hooks captured", graphs(known, taps), taps)
    if steering is not None:
        known = steering.addresses
        some = "one layer steered, 16 configs"
        yield Case(some + at_start, graphs(known, one, False), [], one, 16)
        yield Case(some, graphs(known, one), [], one, 16)
        for configs in (16, CONFIGS):
            name = f"all layers and hooks steered, {configs} configs"
            yield Case(name, graphs(known, taps), [], taps, configs)


def graph_for(runner, batch, ops, exact):  # type: ignore[no-untyped-def]
    """The graph of the start that has these ops, or an exact one, recorded now."""
    from dataclasses import replace

    from vllm.model_executor.layers.residual_ops import Launch

    manager = runner.cudagraph_manager
    plain = next(
        one
        for one in manager.graphs
        if (one.num_tokens, one.uniform_token_count, one.tapped) == (batch, 1, 0)
    )
    if exact and ops not in Launch.families:
        Launch.families = (*Launch.families, ops)
    sizes = {
        family: len(launched)
        for family, launched in enumerate(Launch.families)
        if ops <= launched
    }
    if not exact:
        sizes = {
            f: n for f, n in sizes.items() if replace(plain, tapped=f) in manager.graphs
        }
    chosen = replace(plain, tapped=min(sizes, key=sizes.__getitem__))
    if chosen not in manager.graphs:
        manager.residual_recorder(chosen)
    return manager.graphs[chosen]


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
        print(f"  {case:46s} " + "  ".join(cells), flush=True)


if __name__ == "__main__":
    main()
