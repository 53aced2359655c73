# SPDX-License-Identifier: Apache-2.0
"""A probe scores the text while it is generated, and stops it.

python examples/readouts/live_probe.py

  once upon a time ...
  stopped by readout:watch after 9 of 48 tokens; its last score is 4.12
"""

import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "capture"))
from small import DEMO_MODEL

from vllm import LLM, RequestOutput, SamplingParams

PROMPT = "Anna went to the garden after lunch."


def probe(llm: LLM, layer: int) -> dict[str, object]:
    """A probe fitted to two texts; `vllm probe train` fits many."""
    rows = {"kind": "rows", "hooks": {"post_block": [layer]}, "reduce": "mean"}
    params = SamplingParams(
        max_tokens=1, readouts={"mean": rows | {"positions": "all_prompt"}}
    )
    texts = ["The sun shone and all laughed.", "The rain fell and all wept."]
    one, two = (o.readouts["mean"]["rows"][0] for o in llm.generate(texts, params))
    vector = (one - two) / np.linalg.norm(one - two)
    return {"kind": "probe", "layer": layer, "vectors": [vector.tolist()]}


def watch(llm: LLM, layer: int = 3, tokens: int = 48) -> RequestOutput:
    """Generate freely, then again with a stop at the second highest score."""
    readouts = {"watch": probe(llm, layer)}
    free = SamplingParams(max_tokens=tokens, temperature=0, readouts=readouts)
    (output,) = llm.generate([PROMPT], free)
    scores = np.sort(output.readouts["watch"]["values"][:, 0])
    stop = [{"readout": "watch", "above": float(scores[-3])}]
    held = SamplingParams(
        max_tokens=tokens, temperature=0, readouts=readouts, stop_when=stop
    )
    (output,) = llm.generate([PROMPT], held)
    sample, found = output.outputs[0], output.readouts["watch"]
    print(sample.text)
    print(
        f"stopped by {sample.stop_reason} after {len(sample.token_ids)} of {tokens} "
        f"tokens; its last score is {found['values'][-1, 0]:.2f}"
    )
    return output


if __name__ == "__main__":
    watch(LLM(str(DEMO_MODEL), enable_readouts=True, max_model_len=256))
