# SPDX-License-Identifier: Apache-2.0
"""What is measured of a run: requests that ask for it, and the number they give.

All numbers come from log-probabilities of tokens that are named in the request, in
float32 over the whole vocabulary, not of those that happen to be among the top.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from vllm.v1.residual.bounds import shown
from vllm.v1.residual.numbers import is_integer
from vllm.v1.steering.errors import fail

METRICS = ("logprob", "logit_diff", "recovered", "kl")
PROBE = "probe:"
READOUT = "patching"
"""The name of the readout that a probe's metric asks for."""
MOST_TOKENS = 128
"""Most tokens whose log-probabilities one request names, an upper limit of vLLM's."""

Steering = Mapping[str, Any]
"""As `SamplingParams.steering_vectors`."""


class Ask(NamedTuple):
    """A request of a sweep, of which only the last prompt token's output matters."""

    token_ids: tuple[int, ...]
    steering: Steering | None = None
    tokens: tuple[int, ...] = ()
    """Whose log-probabilities are wanted."""
    top: int = 0
    """How many of the most likely tokens are wanted besides."""
    probe: str | None = None
    """A probe that is read at the last prompt token."""
    capture: Mapping[str, Any] | None = None


class Reply(NamedTuple):
    """What a request gave."""

    logprobs: Mapping[int, float]
    probe: float = math.nan


@dataclass(frozen=True, slots=True)
class Question:
    """A metric with its answer and foil, which may have several tokens each."""

    metric: str
    answer: tuple[int, ...] = ()
    foil: tuple[int, ...] = ()
    clean: tuple[tuple[int, float], ...] = ()
    """Of `kl`: the most likely tokens of the clean run, and their log-probabilities."""

    @property
    def probe(self) -> str | None:
        """The probe's name, if one is the metric."""
        is_probe = self.metric.startswith(PROBE)
        return self.metric.removeprefix(PROBE) if is_probe else None

    def asks(self, token_ids: Sequence[int], steering: Steering | None) -> list[Ask]:
        """The requests that measure a run of a prompt, steered like this.

        Each token of an answer is predicted by a request of its own, whose prompt ends
        with the tokens before it.
        """
        prompt = tuple(token_ids)
        if self.probe is not None:
            return [Ask(prompt, steering, probe=self.probe)]
        if self.metric == "kl":
            return [Ask(prompt, steering, tuple(token for token, _ in self.clean))]
        first = tuple(dict.fromkeys([self.answer[0], *self.foil[:1]]))
        asks = [Ask(prompt, steering, first)]
        for tokens in (self.answer, self.foil):
            for count in range(1, len(tokens)):
                asks.append(Ask(prompt + tokens[:count], steering, (tokens[count],)))
        return asks

    def value(self, replies: Sequence[Reply]) -> float:
        """The number, of the replies to `asks` in their order; not yet `recovered`."""
        first = replies[0]
        if self.probe is not None:
            return first.probe
        if self.metric == "kl":
            return _divergence(dict(self.clean), first.logprobs)
        later = iter(replies[1:])

        def total(tokens: tuple[int, ...]) -> float:
            rest = [next(later).logprobs[token] for token in tokens[1:]]
            return sum(rest, first.logprobs[tokens[0]])

        return total(self.answer) - (total(self.foil) if self.foil else 0.0)

    def towards(self, clean: Reply) -> "Question":
        """The question `kl`, with the distribution of the clean run."""
        return replace(self, clean=tuple(clean.logprobs.items()))


def _divergence(clean: Mapping[int, float], found: Mapping[int, float]) -> float:
    """The divergence in nats over some tokens and all others together."""
    shares = {token: math.exp(logprob) for token, logprob in clean.items()}
    total = sum(
        share * (clean[token] - found[token])
        for token, share in shares.items()
        if share > 0
    )
    rest = 1.0 - sum(shares.values())
    others = 1.0 - sum(math.exp(found[token]) for token in clean)
    if rest > 0 and others > 0:
        total += rest * math.log(rest / others)
    return max(total, 0.0)


def question_of(
    metric: Any,
    answer: Any,
    foil: Any,
    tokenizer: Any,
    vocabulary: int,
    single: Sequence[str] = (),
) -> Question:
    """Check a metric, and find the tokens of its answer and foil.

    Args:
        metric: one of `METRICS`, or `"probe:NAME"`.
        answer: text, a token's id, or a list of ids; None where none is needed.
        foil: as `answer`.
        tokenizer: of the model; None if all are ids.
        vocabulary: number of token ids.
        single: which of `answer` and `foil` must be one token.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    is_probe = isinstance(metric, str) and metric.startswith(PROBE) and metric != PROBE
    if metric not in METRICS and not is_probe:
        raise fail(
            f'metric must be one of {list(METRICS)}, or "{PROBE}NAME"', "metric", metric
        )
    if metric == "kl" or is_probe:
        for name, given in (("answer", answer), ("foil", foil)):
            if given is not None:
                raise fail(
                    f"{name}: the metric {metric} has none; leave it out", name, given
                )
        return Question(metric)
    wanted, other = (
        ()
        if raw is None and name == "foil"
        else _tokens_of(raw, name, tokenizer, vocabulary, name in single)
        for name, raw in (("answer", answer), ("foil", foil))
    )
    if metric == "logit_diff" and foil is None:
        raise fail("foil: the metric logit_diff compares two answers", "foil", foil)
    if metric == "logprob":
        other = ()
    if wanted == other:
        raise fail("foil: it must differ from the answer", "foil", foil)
    return Question(metric, wanted, other)


def _tokens_of(
    raw: Any, name: str, tokenizer: Any, vocabulary: int, single: bool
) -> tuple[int, ...]:
    """The token ids of an answer.

    Args:
        raw: text, an id, or a list of ids.
        name: the parameter's name in messages.
        tokenizer: of the model; None if there is none.
        vocabulary: number of token ids.
        single: whether it must be one token.

    Raises:
        SteeringValidationError: it is none, or more than one where one is needed.

    """
    if isinstance(raw, str):
        if tokenizer is None:
            raise fail(f"{name}: there is no tokenizer; give token ids", name, raw)
        found = tokenizer.encode(raw, add_special_tokens=False)
    else:
        found = list(raw) if isinstance(raw, (list, tuple)) else [raw]
    if not found or not all(is_integer(token, 0, vocabulary) for token in found):
        raise fail(
            f"{name} must be text, or token ids from 0 to {vocabulary - 1}", name, raw
        )
    if single and len(found) != 1:
        raise fail(
            f"{name}: {shown(raw)} is {len(found)} tokens, {shown(found)}; one is "
            "needed, often with a space before it",
            name,
            raw,
        )
    return tuple(int(token) for token in found)
