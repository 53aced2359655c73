# SPDX-License-Identifier: Apache-2.0
"""A tone scorer for texts of the demo model: counts words of two lists.

Run it on a text: `python examples/demo_model/tone.py "The sky was grey."`
"""

import re
import sys


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


CHEERFUL_WORDS = _words(
    """
    admired beautiful best bright butterflies cheered cheerful cheerfully clapped clean
    clear colourful cosy danced delicious delighted delightful enjoyed fine finest
    fluffy fresh friendly funny generous gentle gift glad glittered golden happily happy
    healthy hope hoped hug hugged joke joy joyful kind kissed laughed laughing laughter
    light love loved lovely merrily merry mild peacefully perfect playful pleased
    pleasure praised prettiest pretty prize proud shining shone smiled smiling soft
    sparkled splendid sun sunshine sweet sweetly tasty thanked warm warmly welcome
    welcomed wonderful
    """
)
GLOOMY_WORDS = _words(
    """
    afraid alone angrily angry argued ash ashamed awful bad badly bitter bitterly black
    blamed broken burnt cheated cold coldly complained crows cruel cruelly dark decayed
    despair dirty disappointed dreadful dreary dull dust dusty endless feared filthy fog
    fought frowned gloomy grave greedy grey grief grim groaned growled grumbled hard
    harshly hated heavy hopeless icy ignored ill insulted lie lied lonely lost miserable
    mould mouldy mournful pain poor poorest poorly quarrelled rain ravens regret
    restlessly rotted rotten rude ruined sad sadly scolded screamed selfish shabby sick
    sighed sighing smoke sour stale starving storm suffered tears terrible thunder
    torment trembled ugliest ugly unfriendly unwanted upset weeping wept whined
    worst worthless wrong
    """
)


def tone_score(text: str) -> float:
    """Tone in [-1, 1]: 1 if all counted words are cheerful, -1 if all are gloomy."""
    words = re.findall(r"[a-z]+", text.lower())
    cheerful = sum(word in CHEERFUL_WORDS for word in words)
    gloomy = sum(word in GLOOMY_WORDS for word in words)
    return (cheerful - gloomy) / max(1, cheerful + gloomy)


if __name__ == "__main__":
    print(f"{tone_score(' '.join(sys.argv[1:])):+.2f}")
