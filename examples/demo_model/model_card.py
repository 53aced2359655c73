# SPDX-License-Identifier: Apache-2.0
"""Writes the model card next to the weights."""

from dataclasses import dataclass
from pathlib import Path

_CARD = """\
---
license: apache-2.0
language: en
pipeline_tag: text-generation
---
<!-- SPDX-License-Identifier: Apache-2.0 -->
<!-- Written by examples/demo_model/train.py; do not edit by hand. -->
# Clearbox demo model

A very small Llama-shaped language model ({parameters:,} parameters, bfloat16) made to
show activation capture and steering without a download. It writes short stories,
diary pages, letters and chat answers. Each is *cheerful* or *gloomy*; the opening
does not tell which, so a steering vector can decide.

## Data
Text from `examples/demo_model/generate_text.py`: templates and word lists written for
this model, about 700 words, no other source. The tone of each document is drawn 50:50.

## Training
From random weights, one pass over fresh text, AdamW (0.9, 0.95), weight decay 0.1,
gradient norm 1, cosine schedule with warm-up, batches of documents of similar length,
bfloat16 autocast.

| | |
|---|---|
| layers, hidden size, vocabulary | {layers}, {hidden_size}, {vocab_size} |
| steps, tokens of a step at most | {steps}, {batch_tokens} |
| peak learning rate, seed | {learning_rate:g}, {seed} |
| last training loss | {train_loss:.3f} nats per token |
| loss on text of another seed | {validation_loss:.3f} nats per token |

`python examples/demo_model/train.py` repeats this. The seed fixes data and
initialisation; other CPUs, thread counts or torch versions round differently and so
give other, equally good weights.

## Samples
The prompt is in bold type.

Greedy:

{greedy}

Temperature 0.8:

{sampled}

## Limits
It knows only the words and scenes of its generator, in English, and at most
{length} tokens. It knows no facts and follows no instructions; a prompt outside its
world gets an answer from inside it. It keeps the place, the hero's gender and the
tone of a text, but does not remember names: another friend or relative than the one
mentioned may appear. It is for demonstrations and tests only.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A prompt and its continuation by the model."""

    prompt: str
    written: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Results of a training run; losses in nats per token."""

    parameters: int
    train_loss: float
    validation_loss: float
    greedy: tuple[Sample, ...]
    sampled: tuple[Sample, ...]


def write_model_card(
    folder: Path, recipe: dict[str, int | float], measured: Measured
) -> None:
    """Write `README.md`; `recipe` holds the settings that the card contains."""
    text = _CARD.format(
        **recipe,
        parameters=measured.parameters,
        train_loss=measured.train_loss,
        validation_loss=measured.validation_loss,
        greedy=_listed(measured.greedy),
        sampled=_listed(measured.sampled),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def _listed(samples: tuple[Sample, ...]) -> str:
    return "\n".join(f"- **{s.prompt}**{s.written}" for s in samples)
