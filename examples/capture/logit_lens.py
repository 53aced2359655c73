# SPDX-License-Identifier: Apache-2.0
"""Logit lens: each layer's next-token prediction, from rows returned in the output.

python examples/capture/logit_lens.py "The old house by the river"

  layer 0   ' stood'       0.08
  ...
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from small import DEMO_MODEL, small_engine

from vllm import LLM, SamplingParams


class Head:
    """The final part of the model: its last norm and its output head."""

    def __init__(self, model: Path) -> None:
        weights = load_file(model / "model.safetensors")
        head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
        self._head, self._norm = head.float(), weights["model.norm.weight"].float()
        self._eps = json.loads((model / "config.json").read_text())["rms_norm_eps"]

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Probabilities `[rows, vocabulary]` of rows `[rows, hidden_size]`."""
        rows = rows.float()
        scale = torch.rsqrt(rows.square().mean(dim=-1, keepdim=True) + self._eps)
        return (rows * scale * self._norm @ self._head.T).softmax(dim=-1)


def show(llm: LLM, head: Head, prompt: str) -> None:
    """Capture the last prompt position at every layer, and decode it."""
    capture = {"inline": {"hooks": {"post_block": "all"}, "positions": "last_prompt"}}
    params = SamplingParams(max_tokens=1, temperature=0, capture=capture)
    (output,) = llm.generate([prompt], params)
    rows = output.capture_results["inline"].payload
    for (layer, _), tensor in sorted(rows.items()):
        chance, token = head(tensor)[0].max(dim=-1)
        text = llm.get_tokenizer().decode([token.item()])
        print(f"layer {layer:<3} {text!r:14} {chance.item():.2f}")
    print(f"model     {output.outputs[0].text!r}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt", nargs="?", default="The old house by the river")
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    args = parser.parse_args()
    show(small_engine(args.model, "inline"), Head(args.model), args.prompt)
