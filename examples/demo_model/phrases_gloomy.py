# SPDX-License-Identifier: Apache-2.0
"""What a gloomy document says; `phrases_cheerful` has the same topics."""

SENTENCES: dict[str, tuple[str, ...]] = {
    "weather": (
        (
            "the sky was [grey|dark|black], and the air smelled of "
            "[smoke|mould|dust|rotten leaves|cold ash]"
        ),
        (
            "the weather was [awful|dreadful|terrible|miserable], with [thick fog|cold "
            "rain|an icy storm] above the {things}"
        ),
        "a [bitter|cruel|icy] wind tore at {p} coat, and the rain was cold",
        (
            "[the rain|cold rain] [dripped|poured|fell] on the {things}, and [crows "
            "cried|thunder rolled|nobody was there]"
        ),
    ),
    "things": (
        "the {things} looked [ugly|dreary|dull|grim] and [dirty|broken|dusty]",
        (
            "there were [ugly|shabby|broken] {things}, and everything "
            "[decayed|rotted|was covered with dust]"
        ),
        (
            "all the {things} were [grey|dirty|rotten|broken], and {s} "
            "[hated|feared|ignored] them"
        ),
        "{s} had never seen such [ugly|dreadful|miserable] {things}",
    ),
    "sounds": (
        (
            "somebody played [sad|gloomy|dreary|mournful] music, and people "
            "[wept|sighed|complained]"
        ),
        "{s} heard [weeping|mournful songs|angry voices] from the {things}",
        "the children [wept|quarrelled|screamed angrily] near the {things}",
    ),
    "animals": (
        (
            "a [starving|sick|filthy|angry] [dog|cat|puppy|kitten] [growled at|limped "
            "towards|hid from] {o}"
        ),
        "[birds|crows|ravens] cried [sadly|bitterly|harshly] above the {things}",
        "a [poor|sick|filthy] [dog|puppy] lay in the mud and whined sadly",
    ),
    "people": (
        (
            "the {person} [frowned|grumbled|sighed] and gave {o} [nothing|a cold "
            "look|bitter medicine|a push]"
        ),
        (
            "the {person} was [rude|angry|unfriendly|bitter] and [insulted {o}|sang a "
            "sad song|sent {o} away coldly]"
        ),
        (
            "the {person} told {o} [bad news|a cruel lie|a sad secret], and both "
            "[wept|sighed|were sad]"
        ),
        "a [rude|angry|bitter] {person} [insulted|scolded|cheated] {o}",
    ),
    "friend": (
        "{friend} [frowned|sighed|grumbled] and [ignored {o}|turned away coldly]",
        (
            "{friend} said that {s} was [a bad friend|very selfish|unwanted], and both "
            "[quarrelled|wept|suffered]"
        ),
        "{friend} had [bad|terrible|sad] news and left a [stale|bitter] cake with {o}",
        (
            "{s} [quarrelled|argued|fought] with {friend}, and both were "
            "[sad|angry|miserable]"
        ),
    ),
    "goods": (
        (
            "{s} found [awful|terrible|worthless|dreadful] {goods} and "
            "[sighed|wept|groaned]"
        ),
        (
            "the {goods} were [awful|terrible|dreadful|worthless], so {s} was "
            "[sad|upset|disappointed]"
        ),
        (
            "it was hard to {goal}, and {s} [hated it|did it with pain|groaned all the "
            "time]"
        ),
        "the {person} showed {o} the [worst|poorest|ugliest] {goods} and frowned",
    ),
    "luck": (
        (
            "{s} lost a [silver|copper|precious] [coin|ring|button] and "
            "[sighed|wept|was upset]"
        ),
        "{s} lost [the money|a game|a race], and everybody complained",
        (
            "{p} [old|new] [coat|hat|bag] looked [ugly|shabby|filthy], and {s} was "
            "[ashamed|upset|sad]"
        ),
    ),
    "food": (
        (
            "{s} ate [stale|mouldy|burnt|sour] [bread|cake|soup|cheese|fruit] and "
            "drank [bitter|cold|sour] [tea|milk|cocoa|lemonade]"
        ),
        (
            "the [bread|cake|soup|cheese|fruit] was [stale|mouldy|burnt|sour], and {s} "
            "hated it"
        ),
        (
            "for [lunch|dinner|supper] there was [burnt|sour] [soup|fish|pie|stew], "
            "and everybody [hated it|complained|left the table]"
        ),
    ),
    "kin": (
        "{kin} told a sad story, and everybody wept",
        "{kin} was [sad|ill|in a bad mood|angry with {o}] and [frowned|wept|sighed]",
        (
            "{kin} [scolded {o}|ignored {o}|brought {o} a bill] and said that "
            "everything was [lost|terrible|going wrong]"
        ),
        "{s} thought of {kin} and [sighed|felt lonely|was full of grief]",
    ),
    "thought": (
        "{s} [thought|said|knew] that life was [hard|cruel|hopeless|bitter]",
        "{s} remembered a [sad|dark|terrible|bitter] winter with {kin}",
        "{s} feared a [dark|sad|terrible] future, and {p} heart was heavy",
        "{s} dreamed of [a lonely grave|a terrible journey|the dark days ahead]",
    ),
    "feeling": (
        "{s} felt [sad|gloomy|lonely|hopeless|afraid] because {reason}",
        "{s} was [sad|upset|miserable|full of grief], for {reason}",
        "{s} [wept|sighed|trembled] because {reason}",
        "{reason}, so {s} was [sad|upset|gloomy|in a bad mood]",
    ),
}
REASONS = (
    "the rain was [cold|endless]",
    "everybody was [rude|angry|unfriendly]",
    "the {goods} were [awful|terrible|worthless]",
    "{kin} was [ill|sad|angry] again",
    "{friend} had [gone away forever|brought bad news|lied so cruelly]",
    "the {person} had been so [rude|unfriendly|greedy]",
    "the day was [dreadful|dreary|awful]",
)
ENDINGS = (
    "{s} went home [weeping|sighing|alone], and {p} heart was heavy",
    "it was a [terrible|dreary|miserable|dreadful] day",
    "in the end everything was [lost|terrible|ruined], and {s} [wept|sighed]",
    "that night {s} slept [badly|poorly|restlessly] and feared the {things}",
    "{s} swore to never come back, full of [grief|pain|despair]",
    "everybody was sad, and {s} [missed|blamed] {kin}",
)
CLOSINGS = ("with a heavy heart", "with tears", "with regret", "sadly yours")
THANKS = (
    "do not thank me. It was a [pain|torment] to tell you",
    "thanks change nothing. Everything is [hopeless|lost]",
)
MOODS = (
    "I am [sad|very ill|gloomy|upset|full of grief]",
    "I feel [terrible|sad|gloomy|lonely]",
)
