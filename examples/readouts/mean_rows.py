# SPDX-License-Identifier: Apache-2.0
"""The mean row of a corpus at every layer; only one row per layer is returned.

python examples/readouts/mean_rows.py < texts.txt

  6 texts, 71 tokens
  layer 0    norm 3.81
  ...
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "capture"))
from small import DEMO_MODEL

from vllm import LLM, SamplingParams


def mean_rows(llm: LLM, texts: Sequence[str]) -> tuple[np.ndarray, int]:
    """The mean over all tokens, `[layers, hidden_size]`, and the number of tokens."""
    spec = {"kind": "rows", "hooks": {"post_block": "all"}, "reduce": "sum"}
    readouts = {"sum": spec | {"positions": "all_prompt"}}
    outputs = llm.generate(texts, SamplingParams(max_tokens=1, readouts=readouts))
    tokens = sum(len(output.readouts["sum"].positions) for output in outputs)
    total = np.sum([output.readouts["sum"]["rows"] for output in outputs], axis=0)
    return total / tokens, tokens


def show(llm: LLM, texts: Sequence[str]) -> None:
    """Print the norm of each layer's mean row."""
    rows, tokens = mean_rows(llm, texts)
    print(f"{len(texts)} texts, {tokens} tokens")
    for layer, row in enumerate(rows):
        print(f"layer {layer:<4} norm {np.linalg.norm(row):.2f}")


if __name__ == "__main__":
    engine = LLM(str(DEMO_MODEL), enable_readouts=True, max_model_len=256)
    show(engine, [line.strip() for line in sys.stdin if line.strip()])
