# SPDX-License-Identifier: Apache-2.0
"""Ablation: a happiness vector is added after block 8, and removed from block 9 on."""

from real import HAPPY, SAD, model

from vllm import SamplingParams
from vllm.steering.extract import extract
from vllm.steering.pairs import Pair


def main(llm):
    chat = [{"role": "user", "content": "How was your day?"}]
    found = extract(llm, [*map(Pair, HAPPY, SAD)], layers=[8], position="mean").vectors
    happy = found.vectors[8, "post_block"]
    added = {8: {"vector": happy, "scale": 2}}
    removed = {i: {"vector": happy, "op": "project_out"} for i in range(9, 13)}
    for layers in (added, added | removed):
        params = SamplingParams(max_tokens=24, temperature=0)
        params.steering_vectors = {"post_block": layers}
        (output,) = llm.chat(chat, params, use_tqdm=False)
        print(repr(output.outputs[0].text))


if __name__ == "__main__":
    main(model())
