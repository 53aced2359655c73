# SPDX-License-Identifier: Apache-2.0
"""Rows captured inside CUDA graphs against rows captured without graphs.

    PYTHONPATH=... python tests/gpu/graph_parity.py

Prints, per case, how many keys are equal bit for bit and the largest relative error,
and exits with 1 if one exceeds what bfloat16 allows.
"""

import gc
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

HOOKS = ("pre_attn", "post_attn", "post_block")
LAYERS = 4
PROMPTS = (5, 16, 31, 64, 7, 130, 3, 40)


def model_folder() -> str:
    """A small Llama without weights."""
    folder = Path(tempfile.mkdtemp())
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 1024,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def randomize(model) -> None:  # type: ignore[no-untyped-def]
    """Weights large enough that every sublayer changes the stream."""
    import torch

    generator = torch.Generator().manual_seed(11)
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=generator)
        scale = 1.0 + 0.2 * values if parameter.dim() == 1 else 0.06 * values
        parameter.data.copy_(scale)


def run(model: str, root: Path, **options):  # type: ignore[no-untyped-def]
    """Capture everything of eight requests, in rounds; returns rows and tokens."""
    import torch

    from vllm import LLM, SamplingParams
    from vllm.v1.capture.consumers.filesystem import read_request

    llm = LLM(
        model=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=16,
        gpu_memory_utilization=0.3,
        capture_consumers=[{"name": "filesystem", "params": {"root": str(root)}}],
        **options,
    )
    randomize(llm.llm_engine.model_executor.driver_worker.worker.model_runner.model)
    generator = torch.Generator().manual_seed(3)
    prompts = [
        {"prompt_token_ids": torch.randint(1024, (n,), generator=generator).tolist()}
        for n in PROMPTS
    ]
    capture = {"hooks": {hook: "all" for hook in HOOKS}, "positions": "all"}
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=24,
            ignore_eos=True,
            detokenize=False,
            # Every other request is plain: captured and plain rows share batches.
            capture=None
            if index % 2
            else {"filesystem": {**capture, "request_id": f"r{index}"}},
        )
        for index in range(len(prompts))
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    plain = llm.generate(
        prompts,
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False),
        use_tqdm=False,
    )
    rows = {}
    for index, output in enumerate(outputs):
        if index % 2:
            continue
        result = output.capture_results["filesystem"]
        assert result.status == "ok", result
        length = len(output.prompt_token_ids) + 24 - 1
        for key, tensor in read_request(root, "default", f"r{index}").items():
            assert tensor.shape == (length, 512), (key, tensor.shape)
            rows[index, *key] = tensor
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    plain_tokens = [list(output.outputs[0].token_ids) for output in plain]
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    torch.cuda.empty_cache()
    return rows, tokens, tokens == plain_tokens


def relative_error(rows, reference) -> float:  # type: ignore[no-untyped-def]
    """Norm of the difference over the norm of the reference."""
    difference = rows.float() - reference.float()
    return float(difference.norm() / reference.float().norm())


def main() -> int:
    """Compare graphs with no graphs, and compiled with eager."""
    model = model_folder()
    base = Path(tempfile.mkdtemp())
    variants = {
        "graphs": {},
        "compiled, no graphs": {"compilation_config": {"cudagraph_mode": "NONE"}},
        "eager": {"enforce_eager": True},
        "piecewise": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    }
    got = {
        name: run(model, base / name.replace(" ", ""), **options)
        for name, options in variants.items()
    }
    failed = False
    reference, tokens, _ = got["compiled, no graphs"]
    for name, (rows, own, unchanged) in got.items():
        common = [key for key in rows if own[key[0]] == tokens[key[0]]]
        equal = sum(rows[key].equal(reference[key]) for key in common)
        # Greedy tokens may part ways between compiled and eager code; the rows of
        # the prompt are computed from the same tokens in all variants.
        worst = max(
            relative_error(rows[key][:count], reference[key][:count])
            for key in rows
            for count in [PROMPTS[key[0]]]
        )
        failed |= worst > 2e-2
        print(
            f"{name}: {len(common)} keys with equal tokens of {len(rows)}, {equal} "
            f"equal bit for bit; prompt rows: largest relative error {worst:.2e}; the "
            f"same requests without capture give the same tokens: {unchanged}"
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
