# SPDX-License-Identifier: Apache-2.0
"""Logit lens while generating: each layer's next-token prediction, for every token.

python examples/readouts/lens.py "The old house by the river"

  token          layer 0        layer 1        ...
  ' stood'       ' and'         ' was'         ...
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "capture"))
from small import DEMO_MODEL

from vllm import LLM, SamplingParams


def show(llm: LLM, prompt: str, tokens: int = 12) -> None:
    """Print each layer's likeliest next token, one line per generated token."""
    lens = {"kind": "lens", "layers": "all", "top_k": 1}
    params = SamplingParams(max_tokens=tokens, temperature=0, readouts={"lens": lens})
    (output,) = llm.generate([prompt], params)
    found, tokenizer = output.readouts["lens"], llm.get_tokenizer()

    def word(token: int) -> str:
        return f"{tokenizer.decode([token])!r:15}"

    print("token          " + "".join(f"layer {n:<9}" for n, _ in found.taps))
    written = output.outputs[0].token_ids
    for token, layers in zip(written, found["token_ids"][:, :, 0].tolist()):
        print(word(token) + "".join(map(word, layers)))


if __name__ == "__main__":
    text = sys.argv[1] if len(sys.argv) > 1 else "The old house by the river"
    show(LLM(str(DEMO_MODEL), enable_readouts=True, max_model_len=256), text)
