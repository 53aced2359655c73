# SPDX-License-Identifier: Apache-2.0
"""GPU time of one decode step, fork against upstream, by replaying recorded graphs.

    python benchmarks/decode_step.py --fork FORK_PATH --upstream UPSTREAM_PATH \
        [--model 1b|8b] [--variants off,capture,...] [--quick] [--out results.json]

Each variant runs in a process of its own, with PYTHONPATH set to the folder (or
folders, separated by colons) that holds its `vllm`. Weights are random; the 1B-class
model has 16 layers of width 2048, the 8B-class one 32 of 4096. A figure is the median
of seven measurements of 100 replays between two CUDA events, a range is all seven; all
ratios are to upstream's median in the same run. Also compares the greedy tokens of all
variants. Results are written after each variant, so that a run that is cut short keeps
what it has. `--quick`: both features on, three batch sizes, upstream once; 3 minutes.
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

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for `benchmarks`

from benchmarks import reports  # noqa: E402

MODELS = {
    "tiny": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4},
    "1b": {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16},
    "8b": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
}
BATCHES = (1, 8, 32, 128, 256)
QUICK_BATCHES = (1, 32, 256)
CONFIGS = 64
VARIANTS = {
    "off": "",
    "capture": "capture",
    "steering": "steering",
    "both": "capture steering",
}
"""The fork's, by the features that are on."""
ALL_HOOKS = ("pre_attn", "post_attn", "post_block")


def describe(name: str) -> str:
    """A model in words, for reports."""
    size = MODELS[name]
    return (
        f"{name}: Llama, {size['num_hidden_layers']} layers of width "
        f"{size['hidden_size']}, bfloat16, random weights"
    )


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


def measure(model: str, features: str, batches: list[int]) -> dict[str, Any]:
    """Start an engine and time its graphs; runs in the variant's own process."""
    import time

    import torch

    from vllm import LLM, SamplingParams

    extra: dict[str, Any] = {}
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
        gpu_memory_utilization=0.4,
        kv_cache_memory_bytes=8 << 30,  # so that others may use the GPU meanwhile
        compilation_config={"cudagraph_capture_sizes": batches},
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
    made = list(cases(runner, batches)) if features else []
    # After the graphs were recorded: recording leaves dummy lengths in the inputs,
    # and a replay computes on what it finds there.
    outputs = llm.generate(prompts, params, use_tqdm=False)
    times: dict[str, dict[int, list[float]]] = {"plain": {}}
    plain = {
        desc.num_tokens: graph
        for desc, graph in runner.cudagraph_manager.graphs.items()
        if desc.uniform_token_count == 1 and not getattr(desc, "tapped", 0)
    }
    for batch in batches:
        times["plain"][batch] = replay_ms(plain[batch])
    for case in made:
        times[case.name] = {}
        for batch in batches:
            case.prepare(runner, batch)
            times[case.name][batch] = replay_ms(case.graphs[batch])
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "times": times,
        "start_seconds": started,
        "peak_memory_bytes": torch.cuda.memory_stats()["reserved_bytes.all.peak"],
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
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
            capture._base.zero_()
            if self.captured:
                columns = [capture._columns[tap] for tap in self.captured]
                rows = torch.arange(batch * len(columns), dtype=torch.int32)
                rows = rows.remainder(capture._staging.rows.shape[0])
                rows = rows.view(batch, len(columns)).to(capture._slots.device)
                capture._slots[columns, :batch] = rows.T
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


def cases(runner, batches):  # type: ignore[no-untyped-def]
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
        return {batch: graph_for(runner, batch, ops, exact) for batch in batches}

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


def replay_ms(graph) -> list[float]:  # type: ignore[no-untyped-def]
    """Milliseconds of one replay, measured seven times."""
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
    return samples


def run_variant(
    path: str, model: str, features: str, batches: tuple[int, ...]
) -> dict[str, Any]:
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
        command += ["--batches", ",".join(map(str, batches))]
        log = Path(tempfile.gettempdir()) / "decode_step.log"
        with log.open("ab") as output:
            begin = output.tell()
            subprocess.run(
                command, env=environment, check=True, stdout=output, stderr=output
            )
        found: dict[str, Any] = json.loads(Path(result.name).read_text())
    text = log.read_bytes()[begin:].decode(errors="replace")
    return {**found, **reports.engine_facts(text)}


def evaluated(run: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """What is reported of a variant; `base` is upstream's run.

    `range` holds the smallest and the largest ratio.
    """
    report = {
        name: value
        for name, value in run.items()
        if name not in ("tokens", "times", "device", "torch")
    }
    report["same_tokens_as_upstream"] = run["tokens"] == base["tokens"]
    report |= {"milliseconds": {}, "ratio": {}, "range": {}}
    plain = {b: statistics.median(ms) for b, ms in base["times"]["plain"].items()}
    for case, by_batch in run["times"].items():
        medians = {batch: statistics.median(ms) for batch, ms in by_batch.items()}
        report["milliseconds"][case] = medians
        report["ratio"][case] = {b: ms / plain[b] for b, ms in medians.items()}
        report["range"][case] = {
            batch: [min(ms) / plain[batch], max(ms) / plain[batch]]
            for batch, ms in by_batch.items()
        }
    return report


def main() -> None:
    """Parse the command line, run the variants, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fork")
    parser.add_argument("--upstream")
    parser.add_argument("--model", choices=MODELS, default="1b")
    parser.add_argument("--measure")
    parser.add_argument("--batches", help=argparse.SUPPRESS)
    parser.add_argument("--variants", help="default all; both with --quick")
    parser.add_argument("--quick", action="store_true", help="about 3 minutes")
    parser.add_argument("--out", type=Path, default=Path("decode_step.json"))
    args = parser.parse_args()
    if args.measure is not None:
        batches = [int(batch) for batch in args.batches.split(",")]
        args.out.write_text(json.dumps(measure(args.model, args.measure, batches)))
        return
    if not args.fork or not args.upstream:
        parser.error("--fork and --upstream are needed")
    names = (args.variants or ("both" if args.quick else ",".join(VARIANTS))).split(",")
    names = ["upstream", *names, *([] if args.quick else ["upstream again"])]
    sizes = QUICK_BATCHES if args.quick else BATCHES
    report: dict[str, Any] = {**reports.begun(), "model": describe(args.model)}
    report["variants"] = {}
    base: dict[str, Any] = {}
    for name in names:
        path = args.upstream if name.startswith("upstream") else args.fork
        found = run_variant(path, args.model, VARIANTS.get(name, ""), sizes)
        base = base or found
        report |= {"device": found["device"], "torch": found["torch"]}
        report["variants"][name] = evaluated(found, base)
        reports.save(report, args.out)
        print_variant(name, report["variants"][name])
    reports.write(report, args.out)


def print_variant(name: str, variant: dict[str, Any]) -> None:
    """Milliseconds of a decode step, and in brackets the ratio to upstream."""
    graphs = variant.get("graph_gib")
    print(
        f"{name}: start {variant['start_seconds']:.1f} s, "
        + (f"graphs {graphs:.2f} GiB, " if graphs is not None else "")
        + f"peak memory {variant['peak_memory_bytes'] / 2**20:.0f} MiB, same tokens as "
        f"upstream: {variant['same_tokens_as_upstream']}"
    )
    for case, by_batch in variant["milliseconds"].items():
        ratios = variant["ratio"][case]
        cells = [f"{b}: {ms:.4f} ({ratios[b]:.4f})" for b, ms in by_batch.items()]
        print(f"  {case:46s} " + "  ".join(cells), flush=True)


if __name__ == "__main__":
    main()
