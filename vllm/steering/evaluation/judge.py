# SPDX-License-Identifier: Apache-2.0
"""A language model as a judge, on any server with an OpenAI-compatible API.

The three ratings are those of AxBench (Wu et al. 2025, section 3): presence of the
concept, instruction following and fluency. Each is 0, 1 or 2; the score is their
harmonic mean. The wording of the questions is ours.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import harmonic_mean

import httpx

from vllm.steering.sweep import Generated
from vllm.v1.steering.errors import fail

QUESTIONS = {
    "concept": (
        "How clearly is this concept part of the answer?\nConcept: {concept}\n"
        "0: not at all. 1: somewhat. 2: clearly."
    ),
    "instruction": (
        "How well does the answer do what the instruction asks for?\n"
        "0: it is about something else. 1: partly. 2: it does."
    ),
    "fluency": (
        "How fluent is the answer as English text?\n"
        "0: broken or repetitive. 1: understandable, with faults. 2: fluent."
    ),
}
FORM = (
    "Instruction:\n{instruction}\n\nAnswer:\n{answer}\n\n{question}\n"
    'Reply with "Rating: " and one of 0, 1, 2.'
)


@dataclass(frozen=True, slots=True)
class RemoteJudge:
    """Asks a remote model for ratings."""

    url: str
    """Base URL such as `http://localhost:8000`, without `/v1/chat/completions`."""
    model: str
    concept: str
    api_key: str | None = None

    def __call__(self, answers: Sequence[Generated]) -> float:
        """The mean over answers of the harmonic mean of the three ratings.

        Raises:
            SteeringValidationError: the server fails, or a reply has no rating.

        """
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        with httpx.Client(base_url=self.url, headers=headers, timeout=120) as http:
            scores = [
                harmonic_mean([self._rating(http, one, name) for name in QUESTIONS])
                for one in answers
            ]
        return sum(scores) / len(scores)

    def _rating(self, http: httpx.Client, answer: Generated, name: str) -> float:
        prompt = answer.prompt
        instruction = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        content = FORM.format(
            instruction=instruction,
            answer=answer.text,
            question=QUESTIONS[name].format(concept=self.concept),
        )
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": 64,
        }
        try:
            reply = http.post("/v1/chat/completions", json=body)
            reply.raise_for_status()
            text = reply.json()["choices"][0]["message"]["content"] or ""
        except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
            raise fail(
                f"judge: {self.url} does not answer as expected: {error!r}; it must be "
                "the address of a server with /v1/chat/completions",
                "judge",
                self.url,
            ) from None
        found = re.findall(r"[Rr]ating\W*([0-2])(?!\d)", text)
        if not found:
            raise fail(
                f"judge: {self.model!r} gave no rating but {text[:80]!r}; use a larger "
                "model",
                "judge",
                text[:80],
            )
        return float(found[-1])
