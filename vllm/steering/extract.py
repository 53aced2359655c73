# SPDX-License-Identifier: Apache-2.0
"""Extracts steering vectors from the captured rows of contrasting texts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from vllm.steering.directions import Direction, Method, Rows, direction
from vllm.steering.pairs import Pair, Prompt
from vllm.v1.residual.model_identity import identity_of
from vllm.v1.residual.sizes import row_bytes
from vllm.v1.residual.tap import Tap
from vllm.v1.steering.errors import fail
from vllm.v1.steering.spec.files import VectorSet, vector_set
from vllm.v1.steering.spec.provenance import Provenance

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

Position = Literal["last", "mean"]

GIB = 1 << 30
CONSUMER: dict[str, Any] = {
    "name": "inline",
    "params": {"max_request_bytes": 2 * GIB, "max_inflight_bytes": 4 * GIB},
}
"""The capture consumer with which an engine must be started for extraction."""

_AT_A_TIME = 64
_MOST_HELD = 3 * GIB  # below the limit, as chat templates add a few tokens


@dataclass(frozen=True, slots=True)
class Extracted:
    """The extracted vectors, and by tap the direction with its measures."""

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
    """Extract vectors that point from the negative to the positive texts.

    Args:
        llm: an engine with the capture consumer `CONSUMER`.
        pairs: contrasting texts; 20 to 200 are usual.
        hook: the hook point that is captured, and where the vectors act.
        layers: 0-based layers; all by default.
        method: see `directions.direction`.
        position: whether a text's row is that of its last token or the mean over all
            its tokens.

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
    """Capture one row per prompt.

    Args:
        llm: an engine with the capture consumer `CONSUMER`.
        prompts: texts or chats.
        hook: the hook point.
        layers: 0-based layers; all by default.
        position: the row of the last token, or the mean over all tokens.

    Returns:
        `[len(prompts), hidden_size]` float64 by `(layer, hook)`.

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
    """Run the prompts in groups whose captured rows stay below the memory limit."""
    from vllm import SamplingParams

    spec = {
        "hooks": {hook: "all" if layers is None else list(layers)},
        "positions": "last_prompt" if position == "last" else "all_prompt",
    }
    params = SamplingParams(max_tokens=1, detokenize=False, capture={"inline": spec})
    per_token = 0
    if position == "mean":
        config = llm.llm_engine.vllm_config
        every = len(config.capture_config.hook_points or ())
        of_row = row_bytes(config.model_config)
        per_token = of_row * (every if layers is None else len(layers))
    for some in in_groups(prompts, per_token):
        yield from ask(llm, some, params)


def in_groups(prompts: Sequence[Prompt], per_token: int) -> Iterator[Sequence[Prompt]]:
    """Yield the prompts in groups whose rows the engine can capture at once.

    Args:
        prompts: texts or chats.
        per_token: bytes captured per token.

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
    """An upper bound of the token count: the text's length in bytes."""
    text = prompt if isinstance(prompt, str) else str(prompt)
    return len(text.encode())


def ask(llm: "LLM", prompts: Sequence[Prompt], params: Any) -> "list[RequestOutput]":
    """Run all prompts through `generate` or `chat`; they must be of one kind."""
    run: Any = llm.generate if isinstance(prompts[0], str) else llm.chat
    outputs: list[RequestOutput] = run(list(prompts), params, use_tqdm=False)
    return outputs
