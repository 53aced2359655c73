# SPDX-License-Identifier: Apache-2.0
"""The demo on a real model: capture it, apply a logit lens, steer it.

    make demo MODEL=smollm2

Takes about a minute, and ends with build/demo-smollm2/smollm2.png: each layer's
next-token predictions (left), and answers to one question under a vector that was
extracted from sixteen sentences (right).
"""

import argparse
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from convert import MODELS, checkpoint
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "tasks"))

from real import HAPPY, SAD

from vllm import LLM, SamplingParams
from vllm.steering.extract import extract
from vllm.steering.pairs import Pair

TEXT = "The capital of France is"
QUESTION = [{"role": "user", "content": "How was your day?"}]
LAYER = 8
SCALES = (-2.0, -1.0, 0.0, 1.0, 2.0)
LEAST_COSINE = 0.999
ALL = {"inline": {"hooks": {"post_block": "all"}, "positions": "all_prompt"}}


@dataclass(frozen=True, slots=True)
class Lens:
    """The likeliest next token after each layer, at each position."""

    tokens: list[str]
    """Tokens of the text."""
    words: list[list[str]]
    """Predicted words, `[layers][positions]`."""
    chances: torch.Tensor  # [layers, positions]


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; returns 0 if rows match Transformers' and the answers differ."""
    parser = argparse.ArgumentParser(description="Capture and steer SmolLM2.")
    parser.add_argument("--out", type=Path, default=MODELS.parent / "demo-smollm2")
    out: Path = parser.parse_args(arguments).out
    out.mkdir(parents=True, exist_ok=True)
    llm = engine()
    print(f"\n1. All layers of {TEXT!r}, captured")
    rows, ids = capture(llm, TEXT)
    cosine = least_cosine(rows, ids)
    print(f"   {tuple(rows.shape)} rows; smallest cosine to Transformers' {cosine:.6f}")
    print("\n2. What the model would say after each layer")
    lens = look(llm, TEXT)
    for layer in range(2, len(lens.words), 3):
        print(f"   after block {layer:2}: {lens.words[layer][-1]!r}")
    print(f"\n3. {QUESTION[0]['content']!r}, with a vector of happy less sad sentences")
    answers = steered(llm)
    for scale, answer in answers.items():
        print(f"   {scale:+g}  {answer}")
    draw(out / "smollm2.png", lens, answers)
    print(f"\npicture: {out / 'smollm2.png'}")
    good = cosine > LEAST_COSINE and len(set(answers.values())) == len(SCALES)
    return 0 if good else 1


def engine() -> LLM:
    """Create an engine with capture, readouts and steering."""
    path = checkpoint()
    print("0. Starting the engine, up to half a minute", flush=True)
    return LLM(
        str(path),
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        capture_consumers=["inline"],
        enable_readouts=True,
        enable_steering=True,
    )


def capture(llm: LLM, text: str) -> tuple[torch.Tensor, list[int]]:
    """Capture the rows after each block `[layers, positions, width]`, and the ids."""
    params = SamplingParams(max_tokens=1, capture=ALL)
    (output,) = llm.generate(text, params, use_tqdm=False)
    payload = output.capture_results["inline"].payload
    return torch.stack([payload[tap] for tap in sorted(payload)]), list(
        output.prompt_token_ids
    )


@torch.no_grad()
def least_cosine(rows: torch.Tensor, ids: list[int]) -> float:
    """The smallest cosine between a row and Transformers' row."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint(), dtype=torch.float32)
    seen: list[torch.Tensor] = []
    for block in model.model.layers:
        block.register_forward_hook(lambda _m, _i, out: seen.append(_first(out)))
    model(torch.tensor([ids]))
    cosines = torch.nn.functional.cosine_similarity(rows, torch.stack(seen), dim=-1)
    return cosines.min().item()


def _first(out: Any) -> torch.Tensor:
    tensor: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return tensor.flatten(0, -2)


def look(llm: LLM, text: str) -> Lens:
    """Decode every row with the model's own norm and head."""
    lens = {"kind": "lens", "layers": "all", "top_k": 1, "positions": "all_prompt"}
    params = SamplingParams(max_tokens=1, readouts={"lens": lens})
    (output,) = llm.generate(text, params, use_tqdm=False)
    found, decode = output.readouts["lens"], llm.get_tokenizer().decode
    best = found["token_ids"][:, :, 0].T.tolist()  # [layers, positions]
    words = [[decode([token]) for token in line] for line in best]
    chances = torch.from_numpy(found["logprobs"][:, :, 0].T).exp()
    return Lens([decode([token]) for token in output.prompt_token_ids], words, chances)


def steered(llm: LLM) -> dict[float, str]:
    """The answers to one question, by the vector's coefficient."""
    pairs = [Pair(*sides) for sides in zip(HAPPY, SAD)]
    vectors = extract(llm, pairs, layers=[LAYER], position="mean").vectors
    found = {}
    for scale in SCALES:
        params = SamplingParams(max_tokens=32, temperature=0)
        params.steering_vectors = vectors.spec(scale) if scale else None
        (output,) = llm.chat(QUESTION, params, use_tqdm=False)  # type: ignore[arg-type]
        found[scale] = " ".join(output.outputs[0].text.split())
    return found


def draw(path: Path, lens: Lens, answers: dict[float, str]) -> None:
    """Write the picture as a PNG."""
    import matplotlib

    matplotlib.use("Agg")  # renders to a file, without a window
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(13, 5.2), width_ratios=(1.25, 1)
    )
    shown = [*range(2, len(lens.words), 3)]
    left.imshow(lens.chances[shown], aspect="auto", cmap="Blues", vmin=0, vmax=1)
    for y, layer in enumerate(shown):
        for x, word in enumerate(lens.words[layer]):
            dark = lens.chances[layer, x] > 0.6
            text = word.strip() or repr(word)
            color = "white" if dark else "black"
            left.text(x, y, text[:9], ha="center", va="center", fontsize=8, color=color)
    left.set_yticks(range(len(shown)), [f"block {layer}" for layer in shown])
    left.set_xticks(range(len(lens.tokens)), lens.tokens, fontsize=9)
    left.set_title("What the model would say next, after each block")
    right.axis("off")
    right.set_title("“How was your day?”, steered from sad to happy")
    for number, (scale, answer) in enumerate(answers.items()):
        y = 0.93 - number / len(answers)
        color = ("#2b4a8b", "#5f7cb5", "#555555", "#c98a2b", "#d9660a")[number]
        right.text(0, y, f"{scale:+g}", fontsize=14, color=color, va="top")
        wrapped = textwrap.fill(answer, 58)
        right.text(0.1, y, wrapped, fontsize=9.5, color=color, va="top")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
