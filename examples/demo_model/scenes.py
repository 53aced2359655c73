# SPDX-License-Identifier: Apache-2.0
"""The neutral half of the demo text: who, where, when, and what for.

Nothing in this file may carry a tone: openings are built from it alone, so that
after an opening both tones are equally likely.
"""

from dataclasses import dataclass

GIRLS = (
    "Anna", "Clara", "Emma", "Grace", "Ida", "Julia",
    "Lucy", "Mary", "Nora", "Rose", "Sara", "Vera",
)  # fmt: skip
BOYS = (
    "Adam", "Ben", "Carl", "David", "Felix", "Hugo",
    "Jack", "Leo", "Martin", "Oscar", "Paul", "Tom",
)  # fmt: skip
KIN = (
    "brother", "sister", "mother", "father", "uncle", "aunt", "cousin",
    "grandmother", "grandfather", "neighbour",
)  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A place with the nouns that belong to it; `things` and `goals` are plural."""

    place: str
    preposition: str
    things: tuple[str, ...]
    people: tuple[str, ...]
    goals: tuple[tuple[str, str], ...]
    """Pairs of a verb and its plural object: `("buy", "apples")`."""
    far: bool = True
    """Whether one may take a bus or a train there."""


def _scene(
    place: str,
    things: str,
    people: str,
    goals: str,
    *,
    at: str = "at",
    far: bool = True,
) -> Scene:
    """A scene from word lists separated by blanks, goals as `verb:object`."""
    pairs = [goal.split(":") for goal in goals.split()]
    return Scene(
        place=place,
        preposition=at,
        things=tuple(things.split()),
        people=tuple(people.split()),
        goals=tuple((verb, thing) for verb, thing in pairs),
        far=far,
    )


SCENES = (
    _scene(
        "market",
        "stalls baskets carts flowers",
        "seller farmer",
        "buy:apples buy:onions buy:eggs sell:plums",
    ),
    _scene(
        "harbour",
        "boats ropes nets gulls",
        "sailor fisherman",
        "buy:herrings draw:ships watch:boats",
    ),
    _scene(
        "park",
        "benches trees paths swings",
        "gardener painter",
        "draw:swans feed:ducks pick:chestnuts",
        at="in",
    ),
    _scene(
        "library",
        "shelves books lamps tables",
        "librarian student",
        "borrow:novels read:poems study:maps",
        at="in",
    ),
    _scene(
        "station",
        "trains platforms suitcases signs",
        "guard porter",
        "buy:tickets meet:guests watch:trains",
    ),
    _scene(
        "bakery",
        "loaves ovens cakes trays",
        "baker girl",
        "buy:rolls order:cakes",
        at="in",
        far=False,
    ),
    _scene(
        "farm",
        "barns fields hens fences",
        "farmer shepherd",
        "pick:plums collect:eggs feed:goats",
        at="on",
    ),
    _scene(
        "lake",
        "boats reeds stones ducks",
        "fisherman painter",
        "catch:trout watch:swans collect:stones",
    ),
    _scene(
        "school",
        "desks windows pictures chairs",
        "teacher student",
        "return:books bring:drawings study:maps",
        at="in",
    ),
    _scene(
        "museum",
        "paintings statues halls vases",
        "guide guard",
        "see:paintings draw:statues",
        at="in",
    ),
    _scene(
        "forest",
        "trees leaves ferns paths",
        "woodcutter hunter",
        "pick:mushrooms pick:berries collect:nuts",
        at="in",
    ),
    _scene(
        "beach",
        "shells waves boats rocks",
        "swimmer fisherman",
        "collect:shells watch:waves draw:gulls",
        at="on",
    ),
    _scene(
        "garden",
        "roses bushes bees beans",
        "gardener neighbour",
        "plant:tulips pick:beans cut:roses",
        at="in",
        far=False,
    ),
    _scene(
        "kitchen",
        "pots plates cups spoons",
        "cook maid",
        "bake:biscuits make:pancakes peel:potatoes",
        at="in",
        far=False,
    ),
    _scene(
        "workshop",
        "tools boards wheels shelves",
        "carpenter painter",
        "mend:chairs build:toys paint:boxes",
        at="in",
    ),
    _scene(
        "village",
        "houses gates gardens chimneys",
        "postman farmer",
        "deliver:letters visit:friends sell:eggs",
        at="in",
    ),
    _scene(
        "theatre",
        "curtains seats lamps costumes",
        "actor singer",
        "buy:tickets see:dancers paint:masks",
        at="in",
    ),
    _scene(
        "inn",
        "tables candles windows cups",
        "waiter cook",
        "order:pancakes meet:friends",
        at="in",
    ),
)

# Template language (see generate_text.expand): `[a|b]` chooses, `{slot}` fills in.
TIME = (
    "[in the [morning|afternoon|evening]|at noon|after [lunch|breakfast|work]|on {day}"
    "|before dinner|at [three|four|five] o'clock]"
)
OPENINGS = (
    "{who} [walked|went] to the {place} {time}",
    "{time}, {who} [walked|went] to the {place}",
    "{who} [walked|went] to the {place} with {kin} {time}",
    "{who} [walked|went] to the {place} {time} to {goal}",
    "{who} came to the {place} {time} and looked at the {things}",
    "{time}, {who} met {friend} {at}",
    "{who} spent [an hour|two hours|the day] {at} with {kin}",
    "it was {day}, and {who} was {at} to {goal}",
)
FAR_OPENINGS = (
    "{who} took the [bus|train|tram] to the {place} {time}",
    "{time}, {who} cycled to the {place} with {kin}",
    "{who} drove to the {place} with {friend} {time}",
)
SECOND_OPENINGS = (
    "{s} wanted to {goal}",
    "{s} had a [bag|basket|box] and [two|three|five|ten] coins",
    "{kin} wanted to {goal} there",
    "it took [ten|twenty|thirty] minutes to get there",
    "{s} wore a [blue|brown|green|red] [coat|hat|scarf]",
    "{s} waited for {friend} near the {things}",
    "there was a [letter|book|key|watch] in {p} pocket",
)
# Between sentences that do carry the tone: they make the model remember it.
INTERLUDES = (
    (
        "after [a while|an hour|some time], {s} [sat down near|walked past|stood "
        "before] the {things}"
    ),
    "then {s} opened {p} [bag|book|letter|basket]",
    "the clock struck [two|three|four|five|six]",
    "people came and went near the {things}",
    "{s} looked at the {things} and thought of {kin}",
    "later {s} talked to the {person} about the {goods}",
    "{s} stayed for [an hour|two hours|some time]",
)
