# SPDX-License-Identifier: Apache-2.0
"""The fork's captures of a case, and the effect of steering on its logits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.parity.cases import VOCABULARY, Case
from tests.parity.inside import in_order_of_experts
from tests.parity.recipe import HOOKS
from tests.parity.stand_ins import stand_in
from tests.support.hf_reference import Stream, Tap

PROMPTS = (5, 37)
STEERED_PROMPT = 6
MAX_TOKENS = 4
MAX_TAPS = 40


@dataclass(frozen=True, slots=True)
class Answer:
    """A request and the engine's answer."""

    steered: Tap | None
    fed: list[int]
    """The prompt and all generated tokens but the last: the tokens with rows."""
    num_prompt_tokens: int
    rows: Stream
    logits: torch.Tensor
    """`[generated tokens, vocabulary]`"""


@dataclass(frozen=True, slots=True)
class Answers:
    """All requests of a case."""

    hook_points: dict[int, tuple[str, ...]]
    dtype: torch.dtype
    requests: list[Answer]


def tokens(length: int, seed: int) -> list[int]:
    """A random prompt without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()


def vector(tap: Tap, width: int) -> torch.Tensor:
    """A random vector for a tap, different for each."""
    seed = 1000 * tap[0] + sum(tap[1].encode())
    return torch.randn(width, generator=torch.Generator().manual_seed(seed))


def requests(taps: Sequence[Tap]) -> list[tuple[Tap | None, list[int]]]:
    """The requests of a case: unsteered ones, and one steered at each tap."""
    plain = [(None, tokens(length, seed)) for seed, length in enumerate(PROMPTS)]
    steered = [(tap, tokens(STEERED_PROMPT, 50 + n)) for n, tap in enumerate(taps)]
    return [*plain, *steered]


def _by_hook(points: Mapping[int, Sequence[str]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for layer in sorted(points):
        for hook in points[layer]:
            found.setdefault(hook, []).append(layer)
    return found


def run(case: Case, model: Path, **options: Any) -> Answers:
    """Start an engine, capture everything, and steer each tap in a separate request."""
    from tests.support.captured import LOGITS, Keeper, asking_logits, logprobs_of
    from vllm import LLM

    stand_in(case.stand_ins)
    keeper = Keeper()
    arguments = LOGITS | {
        "model": str(model),
        "dtype": case.dtype,
        "enforce_eager": True,
        "max_model_len": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "disable_log_stats": True,
        "num_gpu_blocks_override": 256,
        "seed": 0,
        "capture_consumers": [keeper],
        "hook_points": ["all"],
        "max_steering_configs": 8,
    }
    llm = LLM(**arguments | dict(case.engine) | options)
    engine = llm.llm_engine
    named = engine.vllm_config.capture_config.hook_points or {}
    points = {layer: tuple(names) for layer, names in named.items()}
    taps = [
        (layer, hook)
        for layer in sorted(points)
        for hook in points[layer]
        if hook in HOOKS
    ]
    assert 0 < len(taps) <= MAX_TAPS, f"{len(taps)} taps"
    asked = requests(taps)
    hooks = _by_hook(points)
    width = engine.model_config.get_hidden_size()
    shapes = engine.vllm_config.capture_config.point_shapes

    def params(tap: Tap | None) -> Any:
        steering = {}
        if tap is not None:
            layer, hook = tap
            wide, _ = shapes.get(layer, {}).get(hook, (width, 0))
            steering = {"steering_vectors": {hook: {layer: vector(tap, wide)}}}
        return asking_logits(MAX_TOKENS, hooks=hooks, **steering)

    outputs = llm.generate(
        [case.prompt(prompt) for _, prompt in asked],
        [params(tap) for tap, _ in asked],
        use_tqdm=False,
    )
    answers = [
        Answer(
            steered=tap,
            fed=[*output.prompt_token_ids, *output.outputs[0].token_ids][:-1],
            num_prompt_tokens=len(output.prompt_token_ids),
            rows=in_order_of_experts(keeper.rows[output.request_id, 0]),
            logits=logprobs_of(output, VOCABULARY),
        )
        for (tap, _), output in zip(asked, outputs)
    ]
    return Answers(points, case.torch_dtype, answers)
