# SPDX-License-Identifier: Apache-2.0
"""Queries an engine under each setting: likelihoods and distributions."""

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.steering.extract import ask
from vllm.steering.measures import Values
from vllm.steering.pairs import Pair, Prompt
from vllm.steering.sweep import Steering

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput


def log_odds(llm: "LLM", pairs: Sequence[Pair], settings: Sequence[Steering]) -> Values:
    """Log-odds of the positive text of each pair under each setting.

    Log-probabilities are summed over the tokens after the longest common prefix of the
    two texts.

    Returns:
        log p(positive) - log p(negative) in nats, `[settings, pairs]`.

    """
    from vllm import SamplingParams

    texts = [side for pair in pairs for side in (pair.positive, pair.negative)]
    params = [
        SamplingParams(
            max_tokens=1, prompt_logprobs=0, detokenize=False, steering_vectors=setting
        )
        for setting in settings
        for _ in texts
    ]
    outputs = ask(llm, texts * len(settings), params)
    found = np.empty((len(settings), len(pairs)))
    for number in range(found.size):
        positive, negative = outputs[2 * number], outputs[2 * number + 1]
        both = zip(positive.prompt_token_ids or (), negative.prompt_token_ids or ())
        shared = len(list(takewhile(lambda ids: ids[0] == ids[1], both)))
        found.flat[number] = _likelihood(positive, shared) - _likelihood(
            negative, shared
        )
    return found


def _likelihood(output: "RequestOutput", start: int) -> float:
    """The summed log-probability of a prompt's tokens from index `start` on."""
    assert output.prompt_logprobs is not None, "they were asked for"
    ids = output.prompt_token_ids or []
    return sum(
        entry[token].logprob
        for entry, token in zip(output.prompt_logprobs[start:], ids[start:])
        if entry is not None
    )


def next_tokens(
    llm: "LLM", prompts: Sequence[Prompt], setting: Steering
) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """The distribution of the first generated token under a setting.

    The engine must have been started with `max_logprobs=-1`.

    Returns:
        Log-probabilities in nats, `[prompts, vocab_size]`.

    """
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=1,
        temperature=1.0,
        logprobs=-1,
        flat_logprobs=True,
        detokenize=False,
        steering_vectors=setting,
    )
    found: list[np.ndarray[Any, np.dtype[np.float32]]] = []
    for output in ask(llm, prompts, params):
        logprobs: Any = output.outputs[0].logprobs
        row = np.full(max(logprobs.token_ids) + 1, -np.inf, np.float32)
        row[logprobs.token_ids] = logprobs.logprobs
        found.append(row)
    return np.stack(found)
