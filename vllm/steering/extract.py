# SPDX-License-Identifier: Apache-2.0
"""Vectors from contrasting texts, by capturing what a model makes of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from vllm.steering.directions import Direction, Method, Rows, direction
from vllm.steering.pairs import Pair, Prompt
from vllm.steering.vectors import VectorSet, vector_set
from vllm.v1.residual.sizes import row_bytes
from vllm.v1.steering.errors import fail
from vllm.v1.steering.plan import Tap
from vllm.v1.steering.spec.model_identity import identity_of
from vllm.v1.steering.spec.provenance import Provenance

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

Position = Literal["last", "mean"]

GIB = 1 << 30
CONSUMER: dict[str, Any] = {
    "name": "inline",
    "params": {"max_request_bytes": 2 * GIB, "max_inflight_bytes": 4 * GIB},
}
"""The capture consumer that an engine needs for extraction."""

_AT_A_TIME = 64
_MOST_HELD = 3 * GIB  # less than the limit: templates add a few tokens


@dataclass(frozen=True, slots=True)
class Extracted:
    """Vectors, and by place how well each tells the two sides apart."""

    vectors: VectorSet
    directions: dict[Tap, Direction]


def extract(
    llm: "LLM",
    pairs: Sequence[Pair],
    hook: str = "post_block",
    layers: Sequence[int] | None = None,
    method: Method = "mean",
    position: Position = "last",
) -> Extracted:
    """Vectors that lead from the negative to the positive texts.

    Args:
        llm: an engine with the capture consumer `CONSUMER`.
        pairs: contrasting texts; 20 to 200 are usual.
        hook: the hook point that is captured, and where the vectors act.
        layers: by default all.
        method: see `directions.direction`.
        position: a text's row is that of its last token, or the mean over all of them.

    Raises:
        SteeringValidationError: there are no pairs.
        CaptureValidationError: the model has no such layer or hook point.

    """
    if not pairs:
        raise fail("pairs: at least one pair is needed", "pairs", [])
    sides = []
    for side in ("positive", "negative"):
        prompts = [getattr(pair, side) for pair in pairs]
        sides.append(capture_rows(llm, prompts, hook, layers, position))
    found = {
        tap: direction(sides[0][tap], sides[1][tap], method) for tap in sorted(sides[0])
    }
    origin = f"{method} of {len(pairs)} pairs, {position} token, {hook}"
    identity = identity_of(llm.llm_engine.vllm_config)
    said = Provenance.of_model(identity, origin)
    vectors = {tap: one.vector for tap, one in found.items()}
    return Extracted(vector_set(vectors, said, "extracted"), found)


def capture_rows(
    llm: "LLM",
    prompts: Sequence[Prompt],
    hook: str = "post_block",
    layers: Sequence[int] | None = None,
    position: Position = "last",
) -> dict[Tap, Rows]:
    """A row for each prompt, by place: `[len(prompts), hidden_size]`.

    Raises:
        RuntimeError: a capture failed.

    """
    found: dict[Tap, list[Rows]] = {}
    for output in _run(llm, prompts, hook, layers, position):
        assert output.capture_results is not None, "every request captures"
        result = output.capture_results["inline"]
        if result.status != "ok":
            raise RuntimeError(f"the capture of a prompt failed: {result.error}")
        for tap, rows in result.payload.items():
            found.setdefault(tap, []).append(rows.double().mean(dim=0).numpy())
    return {tap: np.stack(rows) for tap, rows in found.items()}


def _run(
    llm: "LLM",
    prompts: Sequence[Prompt],
    hook: str,
    layers: Sequence[int] | None,
    position: Position,
) -> Iterator["RequestOutput"]:
    """Run the prompts, a few at a time so that their rows never fill the memory."""
    from vllm import SamplingParams

    spec = {
        "hooks": {hook: "all" if layers is None else list(layers)},
        "positions": "last_prompt" if position == "last" else "all_prompt",
    }
    params = SamplingParams(max_tokens=1, detokenize=False, capture={"inline": spec})
    config = llm.llm_engine.vllm_config
    num_layers = len(config.capture_config.hook_points or ()) if layers is None else 0
    per_token = row_bytes(config.model_config) * max(num_layers, len(layers or ()))
    for some in in_groups(prompts, per_token if position == "mean" else 0):
        yield from ask(llm, some, params)


def in_groups(prompts: Sequence[Prompt], per_token: int) -> Iterator[Sequence[Prompt]]:
    """Prompts in order, as many at a time as the engine lets be captured at once.

    Args:
        prompts: texts or chats.
        per_token: bytes that are captured of each token.

    """
    group: list[Prompt] = []
    held = 0
    for prompt in prompts:
        size = _most_tokens(prompt) * per_token
        if group and (len(group) == _AT_A_TIME or held + size > _MOST_HELD):
            yield group
            group, held = [], 0
        group.append(prompt)
        held += size
    yield group


def _most_tokens(prompt: Prompt) -> int:
    """No tokenizer makes more tokens than a text has bytes."""
    text = prompt if isinstance(prompt, str) else str(prompt)
    return len(text.encode())


def ask(llm: "LLM", prompts: Sequence[Prompt], params: Any) -> "list[RequestOutput]":
    """Complete texts, or answer chats; all prompts are of one kind."""
    run: Any = llm.generate if isinstance(prompts[0], str) else llm.chat
    outputs: list[RequestOutput] = run(list(prompts), params, use_tqdm=False)
    return outputs
