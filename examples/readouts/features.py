# SPDX-License-Identifier: Apache-2.0
"""Features of a sparse autoencoder, token by token.

python examples/readouts/features.py            with random weights, to see the form
python examples/readouts/features.py SAE_FOLDER MODEL

  ' the'    131: 3.27    12: 2.90    77: 1.15
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.append(str(Path(__file__).parents[1] / "capture"))
from small import DEMO_MODEL

from vllm import LLM, SamplingParams


def random_sae(folder: Path, width: int, features: int = 256, layer: int = 3) -> Path:
    """Write a random SAE in SAELens' form; returns its folder."""
    weight = torch.randn(width, features, generator=torch.Generator().manual_seed(0))
    tensors = {"W_enc": weight, "W_dec": weight.T.contiguous()}
    tensors |= {"b_enc": torch.zeros(features), "b_dec": torch.zeros(width)}
    save_file(tensors, folder / "sae_weights.safetensors")
    config = {"architecture": "topk", "k": 8, "hook_point": f"blocks.{layer}."}
    config["hook_point"] += "hook_resid_post"
    (folder / "cfg.json").write_text(json.dumps(config))
    return folder


def show(llm: LLM, prompt: str, top: int = 3, tokens: int = 12) -> None:
    """Print the most active features of each generated token."""
    sae = {"kind": "sae", "sae": "features", "top_k": top}
    params = SamplingParams(max_tokens=tokens, temperature=0, readouts={"sae": sae})
    (output,) = llm.generate([prompt], params)
    found, tokenizer = output.readouts["sae"], llm.get_tokenizer()
    for token, names, values in zip(
        output.outputs[0].token_ids, found["features"], found["activations"]
    ):
        active = "  ".join(f"{n:5}: {v:.2f}" for n, v in zip(names, values))
        print(f"{tokenizer.decode([token])!r:12}{active}")


if __name__ == "__main__":
    model = sys.argv[2] if len(sys.argv) > 2 else str(DEMO_MODEL)
    with tempfile.TemporaryDirectory() as made:
        width = json.loads((Path(model) / "config.json").read_text())["hidden_size"]
        sae = sys.argv[1] if len(sys.argv) > 1 else random_sae(Path(made), width)
        engine = LLM(
            model, enable_readouts=True, sae={"features": str(sae)}, max_model_len=256
        )
        show(engine, "The old house by the river")
