# SPDX-License-Identifier: Apache-2.0
"""What the model would say after each layer, from rows that come with the output.

python examples/capture/logit_lens.py "The old house by the river"

  layer 0   ' stood'  0.08
  ...
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from small import DEMO_MODEL, small_engine

from vllm import SamplingParams


def unembed(rows: torch.Tensor, weights: dict[str, torch.Tensor], eps: float):
    """Probabilities `[rows, vocabulary]`: the final norm, then the output head."""
    rows = rows.float()
    scale = torch.rsqrt(rows.square().mean(dim=-1, keepdim=True) + eps)
    normed = rows * scale * weights["model.norm.weight"].float()
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return (normed @ head.float().T).softmax(dim=-1)


def main() -> None:
    """Capture the last position at every layer and unembed it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt", nargs="?", default="The old house by the river")
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    args = parser.parse_args()
    weights = load_file(args.model / "model.safetensors")
    eps = json.loads((args.model / "config.json").read_text())["rms_norm_eps"]
    llm = small_engine(args.model, "inline")
    capture = {"inline": {"hooks": {"post_block": "all"}, "positions": "last_prompt"}}
    params = SamplingParams(max_tokens=1, temperature=0, capture=capture)
    (output,) = llm.generate([args.prompt], params)
    rows = output.capture_results["inline"].payload
    for (layer, _), tensor in sorted(rows.items()):
        chance, token = unembed(tensor, weights, eps)[0].max(dim=-1)
        text = llm.get_tokenizer().decode([token.item()])
        print(f"layer {layer:2}  {text!r:14} {chance.item():.2f}")
    print(f"model     {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
