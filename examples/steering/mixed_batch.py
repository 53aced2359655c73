# SPDX-License-Identifier: Apache-2.0
"""One batch with a coefficient per request; unsteered requests are unaffected.

python examples/steering/mixed_batch.py

  times -1.0  tone -1.00  The weather was dreadful, with ...
  ...
"""

import sys

from demo_engine import DEMO, TONE, small_engine

from vllm import SamplingParams
from vllm.steering.vectors import load_vectors

sys.path.insert(0, str(DEMO))
from tone import tone_score

PROMPT = "In the evening, Max walked to the harbour with his brother."
SCALES = (-1.0, -0.5, 0.0, 0.5, 1.0)


def main() -> None:
    """Send one prompt with five settings, four of which take slots."""
    llm = small_engine(max_steering_configs=4)
    tone = load_vectors(TONE)
    plain = SamplingParams(max_tokens=40, temperature=0)
    batch = []
    for scale in SCALES:
        params = plain.clone()
        if scale:
            params.steering_vectors = tone.spec(scale)
        batch.append(params)
    outputs = llm.generate([PROMPT] * len(SCALES), batch, use_tqdm=False)
    for scale, output in zip(SCALES, outputs):
        text = output.outputs[0].text.strip()
        print(f"  times {scale:+.1f}  tone {tone_score(text):+.2f}  {text}")
    (alone,) = llm.generate(PROMPT, plain, use_tqdm=False)
    same = outputs[2].outputs[0].token_ids == alone.outputs[0].token_ids
    print(f"  the unsteered request's text equals its text alone: {same}")


if __name__ == "__main__":
    main()
