# SPDX-License-Identifier: Apache-2.0
"""Turns templates into the sentences of one document.

Templates have two marks: `[a|b]` chooses one alternative (they nest), and `{slot}` is
replaced by a detail of the document, which may contain marks itself.
"""

import random
import re
from types import ModuleType
from typing import Literal

import phrases_cheerful
import phrases_gloomy
import scenes

Tone = Literal["cheerful", "gloomy"]
TONES: tuple[Tone, Tone] = ("cheerful", "gloomy")
PHRASES: dict[Tone, ModuleType] = {
    "cheerful": phrases_cheerful,
    "gloomy": phrases_gloomy,
}
TOPICS = tuple(phrases_cheerful.SENTENCES)

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_ARTICLE = re.compile(r"\b([aA]) ([aeiou])")
_SLOT = re.compile(r"\{(\w+)\}")


def expand(template: str, slots: dict[str, str], rng: random.Random) -> str:
    """Resolve choices, innermost first, then slots, until no mark is left.

    Raises:
        KeyError: the template names a slot that `slots` lacks.
    """
    while True:
        text, chosen = _CHOICE.subn(lambda m: rng.choice(m[1].split("|")), template)
        if not chosen:
            text, filled = _SLOT.subn(lambda m: slots[m[1]], text)
            if not filled:
                return text
        template = text


class Writer:
    """Writes sentences about one hero and one scene, in one tone.

    Without a `hero` the story is in the first person. `slots` holds the document's
    details.
    """

    def __init__(self, rng: random.Random, tone: Tone, hero: str | None) -> None:
        """Choose the document's people and its first scene."""
        self.rng = rng
        self.phrases = PHRASES[tone]
        self.tone = tone
        self.slots = _people(rng, hero)
        self.change_scene()

    def change_scene(self) -> None:
        """Move to another place, and start from another topic."""
        rng = self.rng
        self.scene = rng.choice(scenes.SCENES)
        verb, goods = rng.choice(self.scene.goals)
        self.slots |= {
            "place": self.scene.place,
            "at": f"{self.scene.preposition} the {self.scene.place}",
            "person": rng.choice(self.scene.people),
            "goal": f"{verb} [some {goods}|{goods}]",
            "goods": goods,
            "day": rng.choice(scenes.DAYS),
            "time": scenes.TIME,
        }
        # Half the stories about a place begin with the same topic, so that greedy
        # decoding has a reason to tell different stories about different places.
        usual = scenes.SCENES.index(self.scene) % len(TOPICS)
        self.topic = rng.choice((usual, rng.randrange(len(TOPICS))))

    def sentence(self, *templates: str, mark: str = ".") -> str:
        """A sentence from one of the templates: capital first, `mark` last."""
        self.slots["things"] = self.rng.choice(self.scene.things)
        self.slots["reason"] = self.rng.choice(self.phrases.REASONS)
        template = self.rng.choice(templates)
        if template.startswith("{s}") and self.rng.random() < 0.3:
            # Names teach a model to copy from its context; with pronouns only it would
            # not learn to attend to the people mentioned.
            template = "{who}" + template.removeprefix("{s}")
        text = expand(template, self.slots, self.rng)
        text = _ARTICLE.sub(r"\1n \2", text)
        return text[0].upper() + text[1:] + mark

    def opening(self) -> str:
        """One neutral sentence, often two that do not repeat each other."""
        far = scenes.FAR_OPENINGS if self.scene.far else ()
        first = self.rng.choice(scenes.OPENINGS + far)
        said = set(_SLOT.findall(first)) & {"goal", "friend"}
        second = [t for t in scenes.SECOND_OPENINGS if not said & {*_SLOT.findall(t)}]
        opening = self.sentence(first)
        if self.rng.random() < 0.65:
            return opening
        return f"{opening} {self.sentence(*second)}"

    def toned(self, topic: str = "any") -> str:
        """One sentence in the tone, on the given topic or on the next one.

        Topics follow a fixed cycle in small steps: a rule that a small model can learn,
        and that avoids repetition.
        """
        if topic != "any":
            self.topic = TOPICS.index(topic)
        templates = self.phrases.SENTENCES[TOPICS[self.topic]]
        self.topic = (self.topic + self.rng.choice((1, 2))) % len(TOPICS)
        return self.sentence(*templates)

    def body(self, low: int, high: int) -> str:
        """`low` to `high` toned sentences, some interludes, and an ending."""
        sentences = [self.toned()]
        for _ in range(self.rng.randint(low, high) - 1):
            if self.rng.random() < 0.15:
                sentences.append(self.sentence(*scenes.INTERLUDES))
            sentences.append(self.toned())
        sentences.append(self.sentence(*self.phrases.ENDINGS))
        return " ".join(sentences)


def _people(rng: random.Random, hero: str | None) -> dict[str, str]:
    """The slots for the hero, a friend and a relative."""
    everybody = [*scenes.GIRLS, *scenes.BOYS]
    name = hero or rng.choice(everybody)
    everybody.remove(name)
    pronouns = ("she", "her", "her") if name in scenes.GIRLS else ("he", "him", "his")
    subject, other, possessive = pronouns if hero else ("I", "me", "my")
    kin = rng.choice(scenes.KIN)
    return {
        "name": name,
        "who": name if hero else "I",
        "s": subject,
        "o": other,
        "p": possessive,
        "friend": rng.choice(everybody),
        "kin_noun": kin,
        "kin": f"{possessive} {kin}",
    }
