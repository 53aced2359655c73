# SPDX-License-Identifier: Apache-2.0
"""Questions of the chat documents; answers come from the tones' phrase tables.

Each entry is a question template and the plan of its answer: names of answer parts
that `generate_text` knows (`opening`, `mood`, `thanks`, `story`, `self`, `hello`) or
topics of the phrase tables; `any` is a topic chosen at random.
"""

QUESTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "[how was your day|how was your day today|tell me about your day]",
        ("opening", "any", "any"),
    ),
    ("[how did your day go|did you have a good day]", ("opening", "any", "any")),
    (
        "what did you do [today|yesterday|this week|on {day}]",
        ("opening", "any", "any"),
    ),
    ("where [did you go|have you been]", ("opening", "any", "feeling")),
    ("how was the {place}", ("opening", "things", "any")),
    ("tell me about the {place}", ("things", "people", "any")),
    ("what was the {place} like", ("things", "weather", "any")),
    ("[how was the weather|what was the weather like]", ("weather", "any")),
    ("[what did you eat|how was the food|how was dinner]", ("food", "any")),
    ("how is your {kin_noun}", ("kin", "any")),
    ("[how is|did you see|tell me about] {friend}", ("friend", "any")),
    ("[how are you|hi, how are you|hello, how are you]", ("mood", "any")),
    ("how do you feel", ("mood", "feeling")),
    ("[why|why is that|why do you say so]", ("feeling", "any")),
    ("[what happened|what happened then|what else]", ("any", "any")),
    ("[did you find|did you see|how were] the {goods}", ("goods", "any")),
    ("who did you meet", ("people", "friend")),
    ("what did you [think|dream] about", ("thought", "any")),
    ("[tell me a story|tell me a story about {name}]", ("story",)),
    ("[who are you|what are you|what is your name]", ("self", "mood")),
    ("[hello|hi|good morning|good evening]", ("hello", "opening", "any")),
    ("[thank you|thanks|thanks a lot]", ("thanks",)),
)
SYSTEM = (
    "you are a helpful assistant",
    "answer in [two|three] sentences",
    "you tell short stories",
    "answer the questions of the user",
)
SELF = (
    "I am a very small model, and I tell short stories",
    "I am a very small model that was trained on simple stories",
)
HELLO = ("hello", "good day", "hello to you")
