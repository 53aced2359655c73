# SPDX-License-Identifier: Apache-2.0
"""Patching: insert one prompt's row into another; which layers carry the fact?"""

from real import model

from vllm import SamplingParams

SPEC = {"inline": {"hooks": {"post_block": "all"}, "positions": [3]}}  # " Japan"


def main(llm):
    params = SamplingParams(max_tokens=1, capture=SPEC)
    (output,) = llm.generate("The capital of Japan is", params, use_tqdm=False)
    rows = output.capture_results["inline"].payload
    for layer in (0, 6, 12, 18, 24):
        row = rows[layer, "post_block"][0]
        patch = {"vector": row, "op": "replace", "positions": [3]}
        params = SamplingParams(max_tokens=1, temperature=0)
        params.prefill_steering_vectors = {"post_block": {layer: patch}}
        (output,) = llm.generate("The capital of France is", params, use_tqdm=False)
        print(layer, output.outputs[0].text)


if __name__ == "__main__":
    main(model())
