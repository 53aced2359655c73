# SPDX-License-Identifier: Apache-2.0
"""How fast SAELens' store fills, from a served model and from TransformerLens.

The same weights, text, dtype, threads and store settings; only the model given to
`ActivationsStore` differs. Both run the layers up to the hook point and no further.
Turns alternate in one process. On a machine that other jobs use, the CPU time is the
figure that counts.

    make real-model
    python -m tests.interop.environment saelens   # prints a Python that has SAELens
    OMP_NUM_THREADS=1 PYTHON benchmarks/saelens_fill.py \\
        --out benchmarks/results/saelens_fill.md
"""

import argparse
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # for `benchmarks`

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import torch  # noqa: E402

from benchmarks.harness import reports  # noqa: E402

MODEL = ROOT / "build" / "models" / "SmolLM2-135M-Instruct"
TOKENS = 2048
PRODUCTS = ("aten::mm", "aten::addmm", "_C::onednn_mm")
ATTENTION = "_C::cpu_attention_with_kv_cache"
HEAD = """<!-- SPDX-License-Identifier: Apache-2.0 -->
# SAELens store: tokens per second, served against TransformerLens

`python benchmarks/saelens_fill.py`, {date}, {cpu}, {cores} cores, load {load:.0f},
{threads} thread(s) for either side. Model `{model}`, hook point `{hook}`, both sides
stop after it. A turn is one batch of {tokens} tokens of text, from tokens to
activations in the store; {turns} alternating turns, medians. Other jobs ran on the
machine: CPU seconds are those of this process alone.

| dtype | context | served, CPU s | TransformerLens, CPU s | ratio, CPU time | \
ratio, elapsed | bound | rows apart, median |
|---|---|---|---|---|---|---|---|
"""
TAIL = """
The bound is the ratio that remains if the served side did nothing but the matrix
products and the attention. PyTorch's profiler gave their shares of one further batch of
either side:

| dtype | context | served: products | attention | rest | \
TransformerLens: products | rest |
|---|---|---|---|---|---|---|
"""


class Turn(NamedTuple):
    """What one batch cost."""

    elapsed: float
    cpu: float


def hooked(dtype: str, context: int) -> Any:
    """TransformerLens' model with the checkpoint's weights."""
    import transformers
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformer_lens.pretrained.weight_conversions import convert_llama_weights

    known = transformers.AutoConfig.from_pretrained(MODEL)
    config = HookedTransformerConfig(
        n_layers=known.num_hidden_layers,
        d_model=known.hidden_size,
        n_ctx=context,
        d_head=known.head_dim,
        n_heads=known.num_attention_heads,
        n_key_value_heads=known.num_key_value_heads,
        d_mlp=known.intermediate_size,
        d_vocab=known.vocab_size,
        act_fn="silu",
        normalization_type="RMS",
        positional_embedding_type="rotary",
        rotary_dim=known.head_dim,
        rotary_base=int(known.rope_parameters["rope_theta"]),
        rotary_adjacent_pairs=False,
        final_rms=True,
        gated_mlp=True,
        eps=known.rms_norm_eps,
        original_architecture="LlamaForCausalLM",
        device="cpu",
        dtype=getattr(torch, dtype),
    )
    source = transformers.AutoModelForCausalLM.from_pretrained(
        MODEL, dtype=getattr(torch, dtype)
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    model = HookedTransformer(config, tokenizer=tokenizer)
    model.load_state_dict(convert_llama_weights(source, config), strict=False)
    return model.eval()


def served(dtype: str, context: int, layer: int) -> Any:
    """The same on an engine, which loads no later layer."""
    from vllm.interop.saelens import ServedModel

    return ServedModel.start(
        str(MODEL),
        stop_at_layer=layer + 1,
        dtype=dtype,
        max_model_len=context + 1,
        max_num_batched_tokens=TOKENS,
    )


def contexts(size: int) -> Iterator[list[int]]:
    """The project's pages as contexts of that many tokens."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    pages = sorted((ROOT / "docs").rglob("*.md"))
    ids = tokenizer("\n".join(page.read_text() for page in pages))["input_ids"]
    for begin in range(0, len(ids) - size, size):
        yield ids[begin : begin + size]


def store_of(model: Any, context: int, hook: str) -> Any:
    """SAELens' own store on a model."""
    from datasets import Dataset
    from sae_lens.training.activations_store import ActivationsStore

    return ActivationsStore(
        model=model,
        dataset=Dataset.from_dict({"input_ids": list(contexts(context))}),
        streaming=False,
        hook_name=hook,
        hook_head_index=None,
        context_size=context,
        d_in=model.cfg.d_model,
        n_batches_in_buffer=2,
        total_training_tokens=1 << 20,
        store_batch_size_prompts=TOKENS // context,
        train_batch_size_tokens=1024,
        prepend_bos=False,
        normalize_activations="none",
        device=torch.device("cpu"),
        dtype="float32",
    )


def fill(store: Any) -> tuple[torch.Tensor, Turn]:
    """The next batch's activations `[tokens, d_model]`, and what they cost."""
    began, cpu = perf_counter(), process_time()
    rows, _ = store.get_raw_llm_batch()
    return rows, Turn(perf_counter() - began, process_time() - cpu)


def where_it_goes(store: Any) -> dict[str, float]:
    """Shares of one batch's time: matrix products, attention."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as p:
        fill(store)
    found = {event.key: event.self_cpu_time_total for event in p.key_averages()}
    whole = sum(found.values())
    return {
        "products": sum(found.get(name, 0.0) for name in PRODUCTS) / whole,
        "attention": found.get(ATTENTION, 0.0) / whole,
    }


def compare(dtype: str, context: int, hook: str, turns: int) -> dict[str, Any]:
    """Both rates, and how far the activations are apart."""
    layer = int(hook.split(".")[1])
    models = {
        "served": served(dtype, context, layer),
        "lens": hooked(dtype, context),
    }
    stores = {name: store_of(model, context, hook) for name, model in models.items()}
    taken: dict[str, list[Turn]] = {name: [] for name in stores}
    apart = []
    for turn in range(turns + 1):
        rows = {}
        for name, store in stores.items():
            rows[name], cost = fill(store)
            if turn:  # the first warms up
                taken[name].append(cost)
        ours, theirs = rows["served"].double(), rows["lens"].double()
        apart.append((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1))
    parts = {name: where_it_goes(store) for name, store in stores.items()}
    models["served"].llm.llm_engine.engine_core.shutdown()
    return {
        "dtype": dtype,
        "context": context,
        "turns": taken,
        "parts": parts,
        "apart": float(torch.cat(apart).median()),
    }


def lines(found: dict[str, Any]) -> tuple[str, str]:
    """The rows of both tables."""
    turns, parts = found["turns"], found["parts"]
    served_cpu, lens_cpu = (
        statistics.median(turn.cpu for turn in turns[name]) for name in turns
    )
    elapsed = statistics.median(
        slow.elapsed / fast.elapsed
        for fast, slow in zip(turns["served"], turns["lens"])
    )
    ours, theirs = parts["served"], parts["lens"]
    least = served_cpu * (ours["products"] + ours["attention"])
    name = f"| {found['dtype']} | {found['context']} "
    first = (
        f"{name}| {served_cpu:.2f} | {lens_cpu:.2f} | **{lens_cpu / served_cpu:.2f}** "
        f"| {elapsed:.2f} | {lens_cpu / least:.2f} | {found['apart']:.1e} |"
    )
    shares = [ours["products"], ours["attention"], 1 - sum(ours.values())]
    shares += [theirs["products"], 1 - theirs["products"]]
    return first, name + "".join(f"| {share:.0%} " for share in shares) + "|"


def main() -> None:
    """Measure some dtypes and contexts and write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--hook", default="blocks.14.hook_resid_post")
    parser.add_argument(
        "--cells",
        nargs="+",
        default=["bfloat16:2048", "bfloat16:1024", "bfloat16:128"],
        metavar="DTYPE:CONTEXT",
    )
    args = parser.parse_args()
    machine = reports.machine(os.getloadavg())
    facts = {
        "date": reports.begun()["date"][:10],
        "cpu": machine["cpu"],
        "cores": machine["cores"],
        "load": os.getloadavg()[0],
        "threads": torch.get_num_threads(),
        "model": MODEL.name,
        "hook": args.hook,
        "tokens": TOKENS,
        "turns": args.turns,
    }
    rows = parts = ""
    for cell in args.cells:
        dtype, context = cell.split(":")
        found = lines(compare(dtype, int(context), args.hook, args.turns))
        print(*found, sep="\n", flush=True)
        rows, parts = rows + found[0] + "\n", parts + found[1] + "\n"
        args.out.write_text(HEAD.format(**facts) + rows + TAIL + parts)


if __name__ == "__main__":
    main()
