# SPDX-License-Identifier: Apache-2.0
"""Seeded generator of the demo model's text: short documents in one of two tones.

A document opens neutrally and keeps one tone after that; the opening says nothing about
the tone, so a story with this opening may continue in either. Prints samples when run:

    python examples/demo_model/generate_text.py --count 5 --seed 1
"""

import argparse
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import chat_phrases
import scenes
from writer import TONES, Tone, Writer

SYSTEM, USER, ASSISTANT, EOS = "<|system|>", "<|user|>", "<|assistant|>", "<|eos|>"


@dataclass(frozen=True, slots=True)
class Document:
    """One training text; `text` starts with the toneless `opening`."""

    tone: Tone
    opening: str
    text: str


def documents(seed: int) -> Iterator[Document]:
    """Yield an endless stream of documents; equal seeds give equal streams."""
    rng = random.Random(seed)
    forms, weights = zip(*_FORMS, strict=True)
    while True:
        form = rng.choices(forms, weights)[0]
        yield form(rng, rng.choice(TONES))


def neutral_openings(count: int, seed: int) -> list[str]:
    """Prompts without a tone: the openings of stories."""
    rng = random.Random(seed)
    return [_story(rng, rng.choice(TONES)).opening for _ in range(count)]


def words_of(text: str) -> list[str]:
    """The lower-case words of a text, without marks and special tokens."""
    return re.findall(r"[a-z']+", re.sub(r"<\|\w+\|>", " ", text).lower())


def vocabulary(count: int = 4000) -> frozenset[str]:
    """The words of the first `count` documents, in practice all words."""
    return frozenset(
        word
        for document in islice(documents(seed=0), count)
        for word in words_of(document.text)
    )


def _story(rng: random.Random, tone: Tone) -> Document:
    hero = rng.choice(scenes.GIRLS + scenes.BOYS)
    writer = Writer(rng, tone, hero if rng.random() < 0.7 else None)
    opening = writer.opening()
    return Document(tone, opening, f"{opening} {writer.body(3, 5)}")


def _letter(rng: random.Random, tone: Tone) -> Document:
    writer = Writer(rng, tone, hero=None)
    known = (writer.slots["name"], writer.slots["friend"])
    strangers = [n for n in scenes.GIRLS + scenes.BOYS if n not in known]
    opening = f"Dear {rng.choice(strangers)},\n{writer.opening()}"
    closing = writer.sentence(*writer.phrases.CLOSINGS, mark=",")
    text = f"{opening} {writer.body(2, 4)}\n{closing} {writer.slots['name']}"
    return Document(tone, opening, text)


def _diary(rng: random.Random, tone: Tone) -> Document:
    """Several days in a row; these are the long documents."""
    writer = Writer(rng, tone, hero=None)
    first = rng.randrange(7)
    text = opening = "Dear diary,"
    for day in range(first, first + rng.randint(2, 4)):
        writer.change_scene()
        writer.slots["day"] = scenes.DAYS[day % 7]
        dated = f"\n{writer.slots['day']}. {writer.opening()}"
        if text == opening:
            opening += dated
        text += f"{dated} {writer.body(2, 4)}"
    return Document(tone, opening, text)


def _chat(rng: random.Random, tone: Tone) -> Document:
    """One to four questions and answers in the form of the chat template."""
    writer = Writer(rng, tone, hero=None)
    system = rng.random() < 0.3
    head = SYSTEM + writer.sentence(*chat_phrases.SYSTEM) if system else ""
    turns: list[str] = []
    count = rng.choice((1, 1, 1, 2, 2, 3, 4))
    for question, plan in rng.sample(chat_phrases.QUESTIONS, count):
        asked = f"{USER}{_typed(writer, question)}{ASSISTANT}"
        answer = " ".join(_answer_part(writer, part) for part in plan)
        turns += [asked, answer, EOS]
    return Document(tone, head + turns[0], head + "".join(turns[:-1]))


def _typed(writer: Writer, question: str) -> str:
    """The question as users type it, sometimes without a question mark."""
    text = writer.sentence(question, mark="")
    if writer.rng.random() < 0.15:
        return text
    asks = not text.startswith(("Tell", "Hello", "Thank", "Good"))
    return text + ("?" if asks else ".")


def _answer_part(writer: Writer, part: str) -> str:
    """One part of an answer, see `chat_phrases`."""
    tables = {
        "mood": writer.phrases.MOODS,
        "thanks": writer.phrases.THANKS,
        "self": chat_phrases.SELF,
        "hello": chat_phrases.HELLO,
    }
    if part in tables:
        return writer.sentence(*tables[part])
    if part == "opening":
        return writer.opening()
    if part == "story":
        teller = Writer(writer.rng, writer.tone, hero=writer.slots["name"])
        return f"{teller.opening()} {teller.body(2, 3)}"
    return writer.toned(part)


_FORMS = ((_story, 50), (_letter, 12), (_diary, 8), (_chat, 30))


def main() -> None:
    """Print documents with their tones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10, help="documents to print")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for document in islice(documents(args.seed), args.count):
        print(f"[{document.tone}] {document.text}\n")


if __name__ == "__main__":
    main()
