# SPDX-License-Identifier: Apache-2.0
"""Logit lens: each layer's next-token prediction, with its probability."""

from math import exp

from real import model

from vllm import SamplingParams

LENS = {"kind": "lens", "layers": "all", "top_k": 3, "positions": "last_prompt"}


def main(llm):
    params = SamplingParams(max_tokens=1, readouts={"lens": LENS})
    (output,) = llm.generate("The capital of France is", params, use_tqdm=False)
    found = output.readouts["lens"]
    words = found["token_ids"][0].tolist()  # [layers, 3]
    for (layer, _), ids, logprobs in zip(found.taps, words, found["logprobs"][0]):
        texts = [repr(llm.get_tokenizer().decode([token])) for token in ids]
        print(f"{layer:2} {exp(logprobs[0]):4.0%} ", *texts)


if __name__ == "__main__":
    main(model())
