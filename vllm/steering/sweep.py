# SPDX-License-Identifier: Apache-2.0
"""Generates with vectors at several coefficients and measures the texts."""

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.steering.extract import ask
from vllm.steering.pairs import Prompt
from vllm.v1.residual.model_identity import identity_of
from vllm.v1.residual.tap import Tap
from vllm.v1.steering.errors import fail
from vllm.v1.steering.spec.files import VectorSet
from vllm.v1.steering.spec.provenance import Source

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

Score = Callable[[str], float]


Steering = dict[str, Any] | None
"""`steering_vectors` of a request; None for an unsteered one."""


@dataclass(frozen=True, slots=True)
class Generated:
    """One completion."""

    prompt: Prompt
    text: str
    prompt_ids: list[int]
    token_ids: list[int]
    """Generated tokens."""
    ended: bool
    """Whether the model stopped, as opposed to reaching the length limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The results of one vector at one coefficient."""

    tap: Tap
    scale: float
    score: float
    """The mean score of the texts; NaN without a scoring function."""
    perplexity: float
    """Of the generated tokens, under the unsteered model; NaN if there are none."""
    texts: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """A JSON-serialisable dict, with None for NaN."""
        numbers = {"score": self.score, "perplexity": self.perplexity}
        shown = {k: None if math.isnan(v) else v for k, v in numbers.items()}
        layer, hook = self.tap
        texts = list(self.texts)
        where = {"layer": layer, "hook": hook, "scale": self.scale}
        return {**where, **shown, "texts": texts}


def check_fits(llm: "LLM", vectors: VectorSet, file: str) -> None:
    """Check that the vectors were made with the engine's model.

    Raises:
        SteeringValidationError: they were not; the message names the difference and
            the remedy.

    """
    # A server whose model is not here compares widths only.
    engine: Any = llm
    is_here = hasattr(llm, "llm_engine")
    known = identity_of(engine.llm_engine.vllm_config) if is_here else engine.identity
    if known is not None:
        vectors.provenance.check_model(known, Source(file))


def at_scales(vectors: VectorSet, scales: Sequence[float]) -> list[Steering]:
    """The vectors with each coefficient; 0 means unsteered."""
    return [vectors.spec(scale) if scale else None for scale in scales]


def generate(
    llm: "LLM",
    prompts: Sequence[Prompt],
    settings: Sequence[Steering],
    sampling: "SamplingParams",
) -> list[list[Generated]]:
    """Completions by setting: `sampling.n` for each prompt, in order.

    All requests are submitted at once, so that the engine batches them.

    Raises:
        SteeringValidationError: the vectors do not fit the model.

    """
    params = []
    for setting in settings:
        own = sampling.clone()
        own.steering_vectors = setting
        params += [own] * len(prompts)
    outputs = iter(ask(llm, list(prompts) * len(settings), params))
    return [
        [made for one in prompts for made in _completions(one, next(outputs))]
        for _ in settings
    ]


def _completions(prompt: Prompt, output: "RequestOutput") -> list[Generated]:
    ids = list(output.prompt_token_ids or ())
    return [
        Generated(
            prompt, one.text, ids, list(one.token_ids), one.finish_reason == "stop"
        )
        for one in output.outputs
    ]


def sweep(
    llm: "LLM",
    vectors: VectorSet,
    prompts: Sequence[Prompt],
    scales: Sequence[float],
    score: Score | None,
    sampling: "SamplingParams",
) -> list[Cell]:
    """Generate with every vector alone at every coefficient.

    Args:
        llm: an engine with steering enabled.
        vectors: the vectors; each is applied alone.
        prompts: the prompts to complete.
        scales: the coefficients; 0 means unsteered.
        score: maps a text to a number, which is averaged; None for no score.
        sampling: sampling parameters without steering.

    Returns:
        A cell for each vector and coefficient.

    """
    # Unsteered texts are the same for all vectors and generated once.
    steered = sorted(set(scales) - {0.0})
    settings: list[Steering] = [None] if 0.0 in scales else []
    places: list[tuple[Sequence[Tap], float]] = [(vectors.taps, 0.0)] * len(settings)
    for tap in vectors.taps:
        alone = replace(vectors, vectors={tap: vectors.vectors[tap]})
        settings += at_scales(alone, steered)
        places += [([tap], scale) for scale in steered]
    texts = generate(llm, prompts, settings, sampling)
    surprise = perplexities(llm, texts)
    cells = []
    for (taps, scale), made, number in zip(places, texts, surprise, strict=True):
        for tap in taps:
            cells.append(
                Cell(
                    tap=tap,
                    scale=scale,
                    score=mean([score(one.text) for one in made] if score else []),
                    perplexity=number,
                    texts=tuple(one.text for one in made),
                )
            )
    return cells


def perplexities(llm: "LLM", groups: Sequence[Sequence[Generated]]) -> list[float]:
    """The perplexity of each group's generated tokens under the unsteered model."""
    from vllm import SamplingParams

    longest = llm.model_config.max_model_len - 1
    every = [one.prompt_ids + one.token_ids for group in groups for one in group]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    run: Any = llm.generate
    asked = [{"prompt_token_ids": ids[:longest]} for ids in every]
    outputs = iter(run(asked, params, use_tqdm=False))
    found = []
    for group in groups:
        losses = [loss for one in group for loss in _losses(next(outputs), one)]
        found.append(math.exp(mean(losses)))
    return found


def _losses(output: "RequestOutput", made: Generated) -> list[float]:
    assert output.prompt_logprobs is not None, "they were asked for"
    entries = output.prompt_logprobs[len(made.prompt_ids) :]
    return [
        -entry[token].logprob
        for entry, token in zip(entries, made.token_ids, strict=False)
        if entry is not None
    ]


def mean(values: Sequence[float]) -> float:
    """The mean; NaN if there are no values."""
    return sum(values) / len(values) if values else math.nan


def load_score(where: str) -> Score:
    """Load the scoring function named by `FILE.py:FUNCTION`. Runs the file's code.

    Raises:
        SteeringValidationError: the file or the function does not exist.

    """
    file, colon, name = where.rpartition(":")
    if not colon or not Path(file).is_file():
        raise fail(
            f"score: {where!r} must be FILE.py:FUNCTION, and the file must exist",
            "score",
            where,
        )
    spec = importlib.util.spec_from_file_location("steering_score", file)
    if spec is None or spec.loader is None:
        raise fail(f"score: {file!r} is not a Python file", "score", where)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    score = getattr(module, name, None)
    if not callable(score):
        raise fail(f"score: {file!r} has no function {name!r}", "score", where)
    return lambda text: float(score(text))
