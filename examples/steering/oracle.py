# SPDX-License-Identifier: Apache-2.0
"""Ask an activation oracle: an adapter that reads another run's activation.

    python examples/steering/oracle.py MODEL ADAPTER "The text" "What is <act> about?"

A row of the plain model is captured, and added with the length of the stream's own row
where the question has the placeholder, in a request that runs under the adapter.
Adapters that are trained for this (LatentQA, activation oracles) answer in words. Other
requests of the batch run without adapter and without the row.
"""

import argparse
from typing import Any

import torch
from demo_engine import small_engine

from vllm import LLM, RequestOutput, SamplingParams
from vllm.lora.request import LoRARequest

ACT = "<act>"
READ, WRITE = (1, "post_block"), (1, "post_block")
"""Where the row is read and written: `(layer, hook)`."""


def row_of(llm: LLM, ids: list[int], read: tuple[int, str] = READ) -> torch.Tensor:
    """The plain model's row `[hidden_size]` of a text's last token."""
    layer, hook = read
    spec = {"hooks": {hook: [layer]}, "positions": "last_prompt"}
    params = SamplingParams(max_tokens=1, capture={"inline": spec})
    (output,) = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    return output.capture_results["inline"].payload[read][0]


def ask(
    llm: LLM,
    oracle: LoRARequest,
    row: torch.Tensor,
    before: list[int],
    after: list[int],
    write: tuple[int, str] = WRITE,
    **sampling: Any,
) -> RequestOutput:
    """Ask about a row, which is added at the last token of `before`."""
    layer, hook = write
    entry = {"vector": row, "norm_match": True, "positions": [len(before) - 1]}
    params = SamplingParams(
        temperature=0, steering_vectors={hook: {layer: entry}}, **sampling
    )
    prompt = {"prompt_token_ids": before + after}
    (output,) = llm.generate(prompt, params, lora_request=oracle, use_tqdm=False)
    return output


def main() -> None:
    """Ask the question of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("model", "adapter", "text", "question"):
        parser.add_argument(name)
    parser.add_argument("--max-lora-rank", type=int, default=64)
    args = parser.parse_args()
    llm = small_engine(
        model=args.model,
        enable_lora=True,
        max_lora_rank=args.max_lora_rank,
        capture_consumers=["inline"],
    )
    encode = llm.get_tokenizer().encode
    row = row_of(llm, encode(args.text))
    start, found, end = args.question.partition(ACT)
    if not found:
        raise SystemExit(f"the question needs {ACT} where the row is added")
    before = encode(start + " ?")  # A token that only holds the row.
    after = encode(end, add_special_tokens=False)
    oracle = LoRARequest("oracle", 1, args.adapter)
    print(ask(llm, oracle, row, before, after, max_tokens=60).outputs[0].text)


if __name__ == "__main__":
    main()
