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


@dataclass(frozen=True, slots=True)
class Setting:
    """Vectors with a coefficient; a coefficient of 0 means unsteered."""

    vectors: VectorSet
    scale: float

    @property
    def title(self) -> str:
        """A label for output."""
        return f"times {self.scale:+g}" if self.scale else "unsteered"

    def params(self, sampling: "SamplingParams") -> "SamplingParams":
        """A copy of `sampling` with this setting's vectors."""
        params = sampling.clone()
        if self.scale:
            params.steering_vectors = self.vectors.spec(self.scale)
        return params


@dataclass(frozen=True, slots=True)
class Generated:
    """One completion."""

    text: str
    token_ids: list[int]
    """Prompt tokens followed by generated tokens."""
    num_prompt_tokens: int


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


def unsteered_and(vectors: VectorSet, scales: Sequence[float]) -> list[Setting]:
    """The unsteered setting, then the vectors with each non-zero coefficient."""
    return [Setting(vectors, scale) for scale in (0.0, *filter(None, scales))]


def generate(
    llm: "LLM",
    prompts: Sequence[Prompt],
    settings: Sequence[Setting],
    sampling: "SamplingParams",
) -> list[list[Generated]]:
    """Completions by setting: `sampling.n` for each prompt, in order.

    All requests are submitted at once, so that the engine batches them.

    Raises:
        SteeringValidationError: the vectors do not fit the model.

    """
    every = [prompt for _ in settings for prompt in prompts]
    params = [one.params(sampling) for one in settings for _ in prompts]
    outputs = ask(llm, every, params)
    size = len(prompts)
    return [
        [made for output in outputs[i : i + size] for made in _completions(output)]
        for i in range(0, len(outputs), size)
    ]


def _completions(output: "RequestOutput") -> list[Generated]:
    prompt = list(output.prompt_token_ids or ())
    return [
        Generated(one.text, prompt + list(one.token_ids), len(prompt))
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
    settings = [Setting(vectors, 0.0)] if 0.0 in scales else []
    places: list[Tap | None] = [None] * len(settings)
    for tap in vectors.taps:
        alone = replace(vectors, vectors={tap: vectors.vectors[tap]})
        settings += [Setting(alone, scale) for scale in steered]
        places += [tap] * len(steered)
    texts = generate(llm, prompts, settings, sampling)
    surprise = perplexities(llm, texts)
    cells = []
    for place, setting, made, number in zip(
        places, settings, texts, surprise, strict=True
    ):
        for tap in vectors.taps if place is None else [place]:
            cells.append(
                Cell(
                    tap=tap,
                    scale=setting.scale,
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
    prompts = [one.token_ids[:longest] for group in groups for one in group]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    run: Any = llm.generate
    asked = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = iter(run(asked, params, use_tqdm=False))
    found = []
    for group in groups:
        losses = [loss for one in group for loss in _losses(next(outputs), one)]
        found.append(math.exp(mean(losses)))
    return found


def _losses(output: "RequestOutput", made: Generated) -> list[float]:
    assert output.prompt_logprobs is not None, "they were asked for"
    entries = output.prompt_logprobs[made.num_prompt_tokens :]
    ids = made.token_ids[made.num_prompt_tokens :]
    return [
        -entry[token].logprob
        for entry, token in zip(entries, ids, strict=False)
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
