# SPDX-License-Identifier: Apache-2.0
"""How fast SAELens' store fills, from a served model and from TransformerLens.

The same weights, prompts and store settings; only the model given to `ActivationsStore`
differs. Turns alternate in one process, so that a busy machine slows both.

    python -m tests.interop.environment saelens   # prints a Python that has SAELens
    PYTHON benchmarks/saelens_fill.py \\
        --out benchmarks/results/DATE-saelens-fill-cpu.json

TransformerLens stops after the layer that is read; an engine runs all of them.
"""

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `benchmarks` and `tests`

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import torch

from benchmarks.harness import reports

CONTEXT, PROMPTS, VOCABULARY = 128, 32, 1280


def checkpoint(folder: Path, layers: int, width: int) -> Path:
    """A Llama with random weights."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer = Path(__file__).parents[1] / "examples" / "demo_model" / "weights"
    transformers.AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return folder


def hooked(folder: Path, layers: int, width: int) -> Any:
    """TransformerLens' model with the checkpoint's weights."""
    import transformers
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformer_lens.pretrained.weight_conversions import convert_llama_weights

    config = HookedTransformerConfig(
        n_layers=layers,
        d_model=width,
        n_ctx=512,
        d_head=64,
        n_heads=width // 64,
        d_mlp=4 * width,
        d_vocab=VOCABULARY,
        act_fn="silu",
        normalization_type="RMS",
        positional_embedding_type="rotary",
        rotary_dim=64,
        rotary_adjacent_pairs=False,
        final_rms=True,
        gated_mlp=True,
        eps=1e-6,
        original_architecture="LlamaForCausalLM",
        device="cpu",
        dtype=torch.float32,
    )
    source = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = HookedTransformer(config, tokenizer=tokenizer)
    model.load_state_dict(convert_llama_weights(source, config), strict=False)
    return model.eval()


def store_of(model: Any, width: int, hook: str) -> Any:
    """SAELens' own store on a model."""
    from datasets import Dataset
    from sae_lens.training.activations_store import ActivationsStore

    torch.manual_seed(1)
    rows = torch.randint(3, VOCABULARY, (PROMPTS * 8, CONTEXT)).tolist()
    return ActivationsStore(
        model=model,
        dataset=Dataset.from_dict({"input_ids": rows}),
        streaming=False,
        hook_name=hook,
        hook_head_index=None,
        context_size=CONTEXT,
        d_in=width,
        n_batches_in_buffer=2,
        total_training_tokens=1 << 20,
        store_batch_size_prompts=PROMPTS,
        train_batch_size_tokens=1024,
        prepend_bos=False,
        normalize_activations="none",
        device=torch.device("cpu"),
        dtype="float32",
    )


def tokens_per_second(store: Any) -> float:
    """Of one batch of prompts, from tokens to activations in the store's hands."""
    tokens = store.get_batch_tokens(PROMPTS)
    began = perf_counter()
    store.get_activations(tokens)
    return tokens.numel() / (perf_counter() - began)


def compare(layers: int, width: int, turns: int) -> dict[str, Any]:
    """Both rates for a model of this size, and how far the activations are apart."""
    from vllm import LLM
    from vllm.interop.saelens import ServedModel

    hook = f"blocks.{layers - 1}.hook_resid_post"
    with tempfile.TemporaryDirectory() as name:
        folder = checkpoint(Path(name), layers, width)
        llm = LLM(
            str(folder),
            capture_consumers=["inline"],
            dtype="float32",
            max_model_len=2 * CONTEXT,
            max_num_batched_tokens=PROMPTS * CONTEXT,
            enable_prefix_caching=False,
            enforce_eager=True,
        )
        stores = {
            "served": store_of(ServedModel(llm), width, hook),
            "transformer_lens": store_of(hooked(folder, layers, width), width, hook),
        }
        tokens = stores["served"].get_batch_tokens(4)
        apart = [store.get_activations(tokens) for store in stores.values()]
        difference = float((apart[0] - apart[1]).abs().max())
        rates: dict[str, list[float]] = {name: [] for name in stores}
        for turn in range(turns + 1):
            for name, store in stores.items():
                rate = tokens_per_second(store)
                if turn:  # the first warms up
                    rates[name].append(rate)
        llm.llm_engine.engine_core.shutdown()
    medians = {name: statistics.median(found) for name, found in rates.items()}
    return {
        "layers": layers,
        "width": width,
        "hook": hook,
        "tokens_per_second": rates,
        "median": medians,
        "ratio": medians["served"] / medians["transformer_lens"],
        "largest_difference": difference,
    }


def main() -> None:
    """Measure some sizes and write the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--sizes", nargs="+", default=["6x192", "8x512"], metavar="LAYERSxWIDTH"
    )
    args = parser.parse_args()
    report = reports.begun()
    load = os.getloadavg()
    report["settings"] = {"context": CONTEXT, "prompts": PROMPTS, "dtype": "float32"}
    report["models"] = []
    for size in args.sizes:
        layers, width = map(int, size.split("x"))
        found = compare(layers, width, args.turns)
        report["models"].append(found)
        print(size, found["median"], f"{found['ratio']:.2f} times", flush=True)
    report["machine"] = reports.machine(load)
    reports.save(report, args.out)


if __name__ == "__main__":
    main()
