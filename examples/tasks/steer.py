# SPDX-License-Identifier: Apache-2.0
"""Steering: one question, answered sadly and happily."""

from real import HAPPY, SAD, model

from vllm import SamplingParams
from vllm.steering.extract import extract
from vllm.steering.pairs import Pair

QUESTION = [{"role": "user", "content": "How was your day?"}]


def main(llm):
    pairs = list(map(Pair, HAPPY, SAD))
    vectors = extract(llm, pairs, layers=[8], position="mean").vectors
    for scale in (-2, 0, 2):
        params = SamplingParams(max_tokens=24, temperature=0)
        params.steering_vectors = vectors.spec(scale) if scale else None
        (output,) = llm.chat(QUESTION, params, use_tqdm=False)
        print(f"{scale:+d} {output.outputs[0].text!r}")


if __name__ == "__main__":
    main(model())
