# SPDX-License-Identifier: Apache-2.0
"""Ablate a direction at every layer, so that the model cannot write along it.

python examples/steering/ablate.py

  plain:    ...
  ablated:  ...
"""

from demo_engine import TONE, small_engine

from vllm import SamplingParams
from vllm.steering.vectors import load_vectors

PROMPT = "In the evening, Max walked to the harbour with his brother."


def main() -> None:
    """Generate with one entry that acts at all layers and all three hook points."""
    llm = small_engine()
    direction = load_vectors(TONE).vectors[2, "post_block"]
    entry = {"vector": direction, "op": "project_out"}
    points = ("pre_attn", "post_attn", "post_block")
    ablated = {point: {"all": entry} for point in points}
    for name, fields in {"plain": {}, "ablated": {"steering_vectors": ablated}}.items():
        params = SamplingParams(max_tokens=30, temperature=0, **fields)
        (output,) = llm.generate(PROMPT, params, use_tqdm=False)
        print(f"  {name + ':':<9} {output.outputs[0].text.strip()}")


if __name__ == "__main__":
    main()
