# SPDX-License-Identifier: Apache-2.0
"""An in-process engine on a tiny model, and readers of its outputs."""

from collections.abc import Mapping
from typing import Any

import torch

from tests.support.inner_reference import Change, InnerReference, Tap
from vllm import LLM, RequestOutput, SamplingParams


def engine(path: str, **options: Any) -> LLM:
    """An eager float32 engine in this process."""
    chosen: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 8,
        "max_logprobs": -1,
        "enable_prefix_caching": False,
        "enable_steering": True,
    }
    return LLM(model=path, **{**chosen, **options})


def params(max_tokens: int = 6, **fields: Any) -> SamplingParams:
    """Greedy sampling, with the log-probabilities of the whole vocabulary."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0,
        logprobs=-1,
        detokenize=False,
        ignore_eos=True,
        **fields,
    )


def generate(
    llm: LLM, prompts: list[list[int]], sampling: list[SamplingParams]
) -> list[RequestOutput]:
    """All prompts in one call."""
    return llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False
    )


def logprobs(output: RequestOutput) -> torch.Tensor:
    """Log-probabilities `[generated tokens, vocab]`."""
    rows = output.outputs[0].logprobs
    assert rows is not None
    return torch.tensor(
        [[row[token].logprob for token in sorted(row)] for row in rows],
        dtype=torch.float64,
    )


def tokens(output: RequestOutput) -> list[int]:
    """The generated tokens."""
    return list(output.outputs[0].token_ids)


def compared(
    output: RequestOutput, reference: InnerReference, changes: Mapping[Tap, Change]
) -> tuple[float, float]:
    """The largest error of log-probabilities, and the largest effect of the changes.

    Both are relative to the largest log-probability of the library's model.
    """
    prompt = list(output.prompt_token_ids or ())
    ids = [*prompt, *tokens(output)][:-1]
    expected, plain = (
        reference.logprobs(ids, some)[len(prompt) - 1 :] for some in (changes, {})
    )
    largest = expected.abs().max()
    wrong, effect = (
        float((found - expected).abs().max() / largest)
        for found in (logprobs(output), plain)
    )
    return wrong, effect
