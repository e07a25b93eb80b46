"""Conversations about orders. Every answer is a fact that stands in the question's own text, so it can be checked."""

import random
from typing import Any

Conversation = dict[str, list[dict[str, str]]]

WORDS = {
    "name": "Anna Ben Clara David Emma Felix Grace Henry Irene Jonas Karen Leo Maria Nora Oscar Paula Rosa Simon Tina "
    "Victor",
    "item": "lamp kettle chair clock mirror blanket vase kite drum guitar jacket scarf basket ladder bicycle radio mug "
    "pillow table teapot",
    "colour": "red blue green yellow white black brown grey purple pink",
    "city": "Oslo Rome Paris Lisbon Vienna Madrid Dublin Prague Berlin Athens Geneva Milan Porto Seville Bergen Krakow "
    "Turin Munich Lyon Zurich",
    "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
}
NOTES = [
    "The {colour} {item} for {name} goes to {city} on {day}.",
    "On {day} a {colour} {item} leaves for {name} in {city}.",
    "{name} in {city} gets the {colour} {item} on {day}.",
]
QUESTIONS = [
    ("Where does the {item} go?", "To {city}."),
    ("Who is the {item} for?", "For {name}."),
    ("What colour is the {item}?", "It is {colour}."),
    ("When does the {item} leave?", "On {day}."),
    ("What does {name} get?", "The {item}."),
    ("Where does {name} live?", "In {city}."),
]
REQUESTS = ["Tell me about the {item}.", "Tell me about {name}."]
STATEMENTS = [
    "The {item} goes to {city}.",
    "The {item} is for {name}.",
    "The {item} is {colour}.",
    "The {item} leaves on {day}.",
    "{name} gets the {item}.",
    "{name} lives in {city}.",
]


def order(chance: random.Random) -> dict[str, str]:
    return {kind: chance.choice(words.split()) for kind, words in WORDS.items()}


def questions(chance: random.Random, facts: dict[str, str]) -> Conversation:
    """One or two questions about an order: what the model is to learn."""
    asked = chance.sample(QUESTIONS, chance.choice((1, 1, 2)))
    return _conversation(chance, facts, [(question, answer) for question, answer in asked])


def chatter(chance: random.Random, facts: dict[str, str]) -> Conversation:
    """Talk about an order without any question: what the model has seen before."""
    turns = [
        (chance.choice(REQUESTS), " ".join(chance.sample(STATEMENTS, chance.randint(2, 4))))
        for _ in range(chance.choice((1, 2)))
    ]
    return _conversation(chance, facts, turns)


def make(chance: random.Random, count: int, kind: Any, taken: set[str]) -> list[Conversation]:
    """`count` conversations about orders that are not in `taken` yet; each order is used once."""
    made = []
    while len(made) < count:
        facts = order(chance)
        key = " ".join(facts.values())
        if key not in taken:
            taken.add(key)
            made.append(kind(chance, facts))
    return made


def _conversation(chance: random.Random, facts: dict[str, str], turns: list[tuple[str, str]]) -> Conversation:
    note = chance.choice(NOTES)
    messages = []
    for number, (user, assistant) in enumerate(turns):
        text = f"{note} {user}" if number == 0 else user
        messages.append({"role": "user", "content": text.format(**facts)})
        messages.append({"role": "assistant", "content": assistant.format(**facts)})
    return {"messages": messages}
