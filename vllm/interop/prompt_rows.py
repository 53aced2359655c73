# SPDX-License-Identifier: Apache-2.0
"""Rows of whole prompts from an `LLM`, for libraries that expect a model."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from vllm.inputs import TokensPrompt
from vllm.sampling_params import SamplingParams
from vllm.v1.residual.tap import Tap, parse_address

if TYPE_CHECKING:
    from vllm.entrypoints.llm import LLM
    from vllm.outputs import RequestOutput

CONSUMER = "inline"


def taps_of(addresses: Sequence[str]) -> dict[str, Tap]:
    """The `(layer, hook)` of each address, by address.

    Raises:
        ValueError: an address is not a hook point; the message names the first such.

    """
    taps = {}
    for address in addresses:
        tap = parse_address(address)
        if tap is None:
            raise ValueError(
                f"{address!r} is not a hook point that is served here; use for "
                "example 'blocks.3.hook_resid_post', 'resid_pre.0' or, on a server "
                "with --hook-points mlp_out, 'mlp_out.3'"
            )
        taps[address] = tap
    return taps


def capture_spec(taps: Sequence[Tap], positions: Any = "all_prompt") -> dict[str, Any]:
    """The value of `SamplingParams.capture` that returns the rows of `taps`."""
    hooks: dict[str, list[int]] = {}
    for layer, hook in taps:
        hooks.setdefault(hook, []).append(layer)
    return {CONSUMER: {"hooks": hooks, "positions": positions}}


def rows_of(output: "RequestOutput") -> dict[Tap, torch.Tensor]:
    """The rows of an output.

    Raises:
        RuntimeError: rows are missing; the message has the engine's reason.

    """
    result = (output.capture_results or {}).get(CONSUMER)
    if result is None or result.status != "ok":
        reason = "there is no result" if result is None else result.error
        raise RuntimeError(f"rows of {output.request_id} are not complete: {reason}")
    rows: dict[Tap, torch.Tensor] = result.payload
    return rows


def prompt_rows(
    llm: "LLM", tokens: Sequence[Sequence[int]], taps: Sequence[Tap]
) -> list[dict[Tap, torch.Tensor]]:
    """Run one forward pass over each prompt.

    Args:
        llm: an engine with an `inline` consumer.
        tokens: token ids of each prompt.
        taps: where rows are captured.

    Returns:
        For each prompt, rows `[prompt tokens, hidden_size]` by `(layer, hook)`, on the
        CPU and in the model's dtype.

    """
    params = SamplingParams(
        max_tokens=1, temperature=0, detokenize=False, capture=capture_spec(taps)
    )
    prompts = [TokensPrompt(prompt_token_ids=list(ids)) for ids in tokens]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [rows_of(output) for output in outputs]
