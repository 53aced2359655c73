# SPDX-License-Identifier: Apache-2.0
"""Extracts steering vectors from the rows of contrasting texts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from vllm.steering.directions import Direction, Method, Rows, direction
from vllm.steering.pairs import Pair, Prompt
from vllm.v1.residual.model_identity import identity_of
from vllm.v1.residual.tap import Tap
from vllm.v1.steering.errors import fail
from vllm.v1.steering.spec.files import VectorSet, vector_set
from vllm.v1.steering.spec.provenance import Provenance

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

Position = Literal["last", "mean"]


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
        llm: an engine with readouts.
        pairs: contrasting texts; 20 to 200 are usual.
        hook: the hook point that is read, and where the vectors act.
        layers: 0-based layers; all by default.
        method: see `directions.direction`.
        position: whether a text's row is that of its last token or the mean over all
            its tokens.

    Raises:
        SteeringValidationError: there are no pairs.
        ReadoutValidationError: the model has no such layer or hook point.

    """
    if not pairs:
        raise fail("pairs: at least one pair is needed", "pairs", [])
    sides = []
    for side in ("positive", "negative"):
        prompts = [getattr(pair, side) for pair in pairs]
        sides.append(read_rows(llm, prompts, hook, layers, position))
    found = {
        tap: direction(sides[0][tap], sides[1][tap], method) for tap in sorted(sides[0])
    }
    origin = f"{method} of {len(pairs)} pairs, {position} token, {hook}"
    identity = identity_of(llm.llm_engine.vllm_config)
    said = Provenance.of_model(identity, origin)
    vectors = {tap: one.vector for tap, one in found.items()}
    return Extracted(vector_set(vectors, said, "extracted"), found)


def read_rows(
    llm: "LLM",
    prompts: Sequence[Prompt],
    hook: str = "post_block",
    layers: Sequence[int] | None = None,
    position: Position = "last",
) -> dict[Tap, Rows]:
    """Read one row per prompt.

    Args:
        llm: an engine with readouts.
        prompts: texts or chats.
        hook: the hook point.
        layers: 0-based layers; all by default.
        position: the row of the last token, or the mean over all tokens.

    Returns:
        `[len(prompts), hidden_size]` float64 by `(layer, hook)`.

    Raises:
        RuntimeError: a row could not be read.

    """
    spec = {
        "kind": "rows",
        "hooks": {hook: "all" if layers is None else list(layers)},
        "positions": "last_prompt" if position == "last" else "all_prompt",
        "reduce": position,
    }
    found: dict[Tap, list[Any]] = {}
    for results in read_out(llm, prompts, {"row": spec}):
        own = results["row"]
        for tap, row in zip(own.taps, own["rows"], strict=True):
            found.setdefault(tap, []).append(row)
    return {tap: np.stack(rows).astype(np.float64) for tap, rows in found.items()}


def read_out(
    llm: "LLM", prompts: Sequence[Prompt], readouts: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the results of each prompt's readouts, by name.

    Raises:
        RuntimeError: a readout failed.

    """
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, detokenize=False, readouts=readouts)
    for output in ask(llm, prompts, params):
        for result in output.readouts.values():
            if result.error is not None:
                raise RuntimeError(f"a prompt was not read: {result.error}")
        yield output.readouts


def ask(llm: "LLM", prompts: Sequence[Prompt], params: Any) -> "list[RequestOutput]":
    """Run all prompts through `generate` or `chat`; they must be of one kind."""
    run: Any = llm.generate if isinstance(prompts[0], str) else llm.chat
    outputs: list[RequestOutput] = run(list(prompts), params, use_tqdm=False)
    return outputs
