# SPDX-License-Identifier: Apache-2.0
"""Runs hook functions of vllm-lens in an engine of one or several ranks.

python -m tests.multiprocess.hooked MODEL RANKS FOUND.json
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

PROMPTS = [[5, 9, 3, 77, 21, 8, 8, 40], [9, 101, 3, 7]]
"""The first is hooked, the second is not."""


def turn(context: Any, rows: torch.Tensor) -> torch.Tensor:
    """Save the norms, and change rows by what all of their numbers are."""
    context.saved.setdefault("norms", []).extend(rows.norm(dim=-1).tolist())
    return rows.flip(-1) * 0.5 + rows


def main() -> None:
    """Write tokens, log-probabilities and saved values."""
    from vllm import LLM, SamplingParams
    from vllm.interop.vllm_lens import Hook

    model, ranks, found = sys.argv[1:]
    llm = LLM(
        model,
        dtype="float32",
        vllm_lens_api=True,
        enforce_eager=True,
        skip_tokenizer_init=True,
        tensor_parallel_size=int(ranks),
        max_model_len=128,
        gpu_memory_utilization=0.2,
    )
    given: list[dict[str, Any]] = [
        {"apply_hooks": [Hook(turn, [0, 1]), Hook(turn, [1], pre=True)]},
        {},
    ]
    params = [
        SamplingParams(
            max_tokens=5,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            logprobs=5,
            extra_args=args or None,
        )
        for args in given
    ]
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    document = [
        {
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": [
                sorted((token, one.logprob) for token, one in row.items())
                for row in output.outputs[0].logprobs or ()
            ],
            "saved": {str(k): v for k, v in (output.hook_results or {}).items()},
        }
        for output in outputs
    ]
    Path(found).write_text(json.dumps(document, default=vars))


if __name__ == "__main__":
    main()
