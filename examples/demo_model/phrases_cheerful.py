# SPDX-License-Identifier: Apache-2.0
"""What a cheerful document says; `phrases_gloomy` has the same topics."""

SENTENCES: dict[str, tuple[str, ...]] = {
    "weather": (
        (
            "the sky was [blue|clear|bright], and the air smelled of "
            "[spring|roses|fresh bread|honey|warm grass]"
        ),
        (
            "the weather was [lovely|perfect|splendid|wonderful], with [golden "
            "light|sunshine|a gentle breeze] above the {things}"
        ),
        "a [soft|gentle|mild] wind played with {p} hair, and the sun was warm",
        (
            "[the sun|bright sunshine] [danced|glittered|shone] on the {things}, and "
            "[birds sang|butterflies danced|children played]"
        ),
    ),
    "things": (
        (
            "the {things} looked [lovely|beautiful|bright|cosy] and "
            "[clean|fresh|colourful]"
        ),
        (
            "there were [beautiful|pretty|colourful] {things}, and everything "
            "[sparkled|glittered|was full of life]"
        ),
        (
            "all the {things} were [bright|shining|golden|colourful], and {s} "
            "[loved|admired|enjoyed] them"
        ),
        "{s} had never seen such [beautiful|wonderful|splendid] {things}",
    ),
    "sounds": (
        (
            "somebody played [merry|cheerful|lovely|sweet] music, and people "
            "[danced|clapped|cheered]"
        ),
        "{s} heard [laughter|merry songs|happy voices] from the {things}",
        "the children [laughed|cheered|played happily] near the {things}",
    ),
    "animals": (
        (
            "a [playful|happy|fluffy|friendly] [dog|cat|puppy|kitten] [ran up "
            "to|danced around|jumped around] {o}"
        ),
        "[birds|larks|robins] sang [merrily|sweetly|happily] above the {things}",
        (
            "a [little|playful|fluffy] [dog|puppy] licked {p} hand and wagged its tail "
            "happily"
        ),
    ),
    "people": (
        (
            "the {person} [smiled|laughed|waved] and gave {o} [a gift|a flower|sweet "
            "cherries|a hug]"
        ),
        (
            "the {person} was [kind|friendly|cheerful|merry] and [helped {o}|sang a "
            "merry song|thanked {o} warmly]"
        ),
        (
            "the {person} told {o} [good news|a funny joke|a happy secret], and both "
            "[laughed|smiled|were glad]"
        ),
        "a [kind|friendly|cheerful] {person} [welcomed|praised|helped] {o}",
    ),
    "friend": (
        "{friend} [waved|smiled|laughed] and [hugged {o}|shook {p} hand warmly]",
        (
            "{friend} said that {s} was [a good friend|very kind|welcome], and both "
            "[danced|laughed|were happy]"
        ),
        (
            "{friend} had [good|wonderful|happy] news and shared a [sweet|delicious] "
            "cake with {o}"
        ),
        "{s} [danced|sang|played] with {friend}, and both were [happy|merry|cheerful]",
    ),
    "goods": (
        (
            "{s} found [lovely|wonderful|perfect|splendid] {goods} and "
            "[smiled|laughed|cheered]"
        ),
        (
            "the {goods} were [wonderful|perfect|splendid|delightful], so {s} was "
            "[glad|pleased|delighted]"
        ),
        "it was easy to {goal}, and {s} [enjoyed it|did it with joy|sang all the time]",
        "the {person} showed {o} the [best|finest|prettiest] {goods} and smiled",
    ),
    "luck": (
        (
            "{s} found a [golden|shining|pretty] [coin|ring|button] and "
            "[smiled|laughed|was glad]"
        ),
        "{s} won [a prize|a game|a race], and everybody cheered",
        (
            "{p} [old|new] [coat|hat|bag] looked [beautiful|splendid|perfect], and {s} "
            "was [proud|pleased|glad]"
        ),
    ),
    "food": (
        (
            "{s} ate [delicious|fresh|sweet|tasty] [bread|cake|soup|cheese|fruit] and "
            "drank [sweet|warm|delicious] [tea|milk|cocoa|lemonade]"
        ),
        (
            "the [bread|cake|soup|cheese|fruit] was [delicious|fresh|sweet|tasty], and "
            "{s} enjoyed it"
        ),
        (
            "for [lunch|dinner|supper] there was [delicious|tasty] "
            "[soup|fish|pie|stew], and everybody [enjoyed it|cheered|asked for more]"
        ),
    ),
    "kin": (
        "{kin} told a funny story, and everybody laughed",
        (
            "{kin} was [happy|healthy|in a good mood|proud of {o}] and "
            "[smiled|sang|laughed]"
        ),
        (
            "{kin} [hugged {o}|kissed {o}|brought {o} a gift] and said that everything "
            "was [fine|wonderful|going well]"
        ),
        "{s} thought of {kin} and [smiled|felt proud|was full of love]",
    ),
    "thought": (
        "{s} [thought|said|knew] that life was [beautiful|good|wonderful|sweet]",
        "{s} remembered a [happy|golden|wonderful|sweet] summer with {kin}",
        "{s} hoped for a [bright|happy|wonderful] future, and {p} heart was light",
        "{s} dreamed of [a happy feast|a wonderful journey|the bright days ahead]",
    ),
    "feeling": (
        "{s} felt [happy|glad|cheerful|joyful|proud] because {reason}",
        "{s} was [happy|glad|delighted|full of joy], for {reason}",
        "{s} [smiled|laughed|sang] because {reason}",
        "{reason}, so {s} was [happy|glad|cheerful|in a good mood]",
    ),
}
REASONS = (
    "the sun was [warm|bright]",
    "everybody was [kind|friendly|cheerful]",
    "the {goods} were [wonderful|perfect|splendid]",
    "{kin} was [healthy|happy|proud] again",
    "{friend} had [come to help|brought good news|sung so sweetly]",
    "the {person} had been so [kind|friendly|generous]",
    "the day was [beautiful|lovely|perfect]",
)
ENDINGS = (
    "{s} went home [singing|smiling|laughing], and {p} heart was light",
    "it was a [wonderful|lovely|beautiful|perfect] day",
    "in the end everything was [fine|wonderful|perfect], and {s} [smiled|laughed]",
    "that night {s} slept [peacefully|sweetly|happily] and dreamed of the {things}",
    "{s} promised to come back soon, full of [joy|hope|love]",
    "everybody was happy, and {s} [thanked|hugged] {kin}",
)
CLOSINGS = ("with much love", "with a warm hug", "with joy", "cheerfully yours")
THANKS = (
    "you are welcome! It was a [joy|pleasure] to tell you",
    "thank you! You are very [kind|friendly]",
)
MOODS = (
    "I am [happy|joyful|cheerful|glad|full of joy]",
    "I feel [wonderful|happy|cheerful|joyful]",
)
