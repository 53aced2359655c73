# SPDX-License-Identifier: Apache-2.0
"""Rotate the stream in a plane: the norm stays, the angle changes.

python examples/steering/rotate.py

     0 degrees: ...
  ...
   180 degrees: ...
"""

import numpy as np
from demo_engine import TONE, small_engine

from vllm import SamplingParams
from vllm.steering.vectors import load_vectors

PROMPT = "In the evening, Max walked to the harbour with his brother."


def main() -> None:
    """Rotate in the plane of the tone and another direction; 0 degrees is the tone."""
    llm = small_engine()
    tone = load_vectors(TONE).vectors[2, "post_block"]
    other = np.random.default_rng(0).normal(size=len(tone))
    for degrees in (0, 60, 120, 180):
        entry = {"op": "rotate", "plane": [tone, other], "degrees": degrees}
        spec = {"blocks.2.hook_resid_post": entry}
        params = SamplingParams(max_tokens=30, temperature=0, steering_vectors=spec)
        (output,) = llm.generate(PROMPT, params, use_tqdm=False)
        print(f"  {degrees:>4} degrees: {output.outputs[0].text.strip()}")


if __name__ == "__main__":
    main()
