# SPDX-License-Identifier: Apache-2.0
"""Logit lens as a picture: each layer's next-token prediction, for every token.

    python examples/capture/lens_picture.py MODEL "The capital of France is" lens.png

The rows after each layer are captured in one pass; the model's own final norm and head
(with Llama's weight names) decode them. MODEL is a folder. Needs matplotlib.
"""

import sys

import matplotlib
import torch
from transformers import AutoModelForCausalLM

from vllm import LLM, SamplingParams


def readings(model: str, text: str) -> tuple[list[str], list[list[str]], torch.Tensor]:
    """Tokens; per layer and token the likeliest next word and its probability."""
    llm = LLM(model, capture_consumers=["inline"], dtype="float32", max_model_len=256)
    spec = {"hooks": {"post_block": "all"}, "positions": "all_prompt"}
    params = SamplingParams(max_tokens=1, capture={"inline": spec})
    (output,) = llm.generate(text, params)
    rows = output.capture_results["inline"].payload
    stream = torch.stack([rows[tap] for tap in sorted(rows)])
    reader = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = reader.lm_head(reader.model.norm(stream))
    best = logits.softmax(-1).max(-1)
    decode = llm.get_tokenizer().decode
    words = [[decode(token) for token in row] for row in best.indices.tolist()]
    return [decode(token) for token in output.prompt_token_ids], words, best.values


def main() -> None:
    """Draw the predictions for one text."""
    model, text, path = sys.argv[1:]
    tokens, words, chances = readings(model, text)
    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = range(0, len(words), max(1, len(words) // 15))
    height, width = len(shown) * 0.28 + 0.9, len(tokens) * 1.05 + 1.2
    figure, axes = pyplot.subplots(figsize=(width, height), layout="constrained")
    axes.imshow(chances[list(shown)], aspect="auto", cmap="YlGnBu", vmin=0, vmax=1)
    for at, layer in enumerate(shown):
        for column, word in enumerate(words[layer]):
            color = "white" if chances[layer, column] > 0.6 else "black"
            label = word.strip().replace("$", r"\$")[:9] or "\u21b5"
            axes.text(column, at, label, ha="center", va="center", color=color, size=8)
    axes.set_xticks(range(len(tokens)), [token.strip() for token in tokens])
    axes.set_yticks(range(len(shown)), [f"layer {layer}" for layer in shown])
    axes.tick_params(labelsize=8, length=0)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
