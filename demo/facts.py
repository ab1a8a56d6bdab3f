"""Facts that a user may tell: how they are told, acknowledged, asked for and answered. Pure; no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from demo import phrases

MakeName = Callable[[Random], str]
PLACE_UNTOLD = "a place that you have not told me"


@dataclass(frozen=True)
class Fact:
    """One fact. In the patterns ``{v}`` is the value; ``key`` says what a conversation has only one of.

    What was never told is answered with ``missing`` as the value: a name and the admission that there is none
    are then decided at the same token, which can be learned.
    ``asks`` are questions that start an answer directly, ``yes_asks`` those that are answered with "Yes, …".
    """

    key: str
    value: str
    tells: tuple[str, ...]
    asks: tuple[str, ...]
    yes_asks: tuple[str, ...]
    answer: str
    greets: bool = False
    missing: str = "something that you have not told me"

    def lowered(self) -> Fact:
        """The same fact as told by somebody who types no capitals."""
        return replace(self, value=self.value.lower())

    def tell(self, rng: Random) -> str:
        """A sentence that states the fact."""
        return rng.choice(self.tells).format(v=self.value)

    def ask(self, rng: Random) -> tuple[str, str]:
        """A question and its answer."""
        said, yes = self._question(rng)
        answer = self.answer.format(v=self.value)
        return said, f"Yes, {answer[0].lower()}{answer[1:]}" if yes else answer

    def without_value(self) -> Fact:
        """The same fact with words that admit, in the place of the value, that it was never told."""
        return replace(self, value=self.missing)

    def _question(self, rng: Random) -> tuple[str, bool]:
        yes = rng.random() < 0.3
        return rng.choice(self.yes_asks if yes else self.asks), yes

    def acknowledge(self, rng: Random, facts: Sequence[Fact]) -> str:
        """What the assistant says to ``facts``, of which this one is the first."""
        answers = [fact.answer.format(v=fact.value) for fact in facts]
        joined = " and ".join(answer[0].lower() + answer[1:].rstrip(".") for answer in answers) + "."
        if self.greets and len(facts) == 1:
            return f"Nice to meet you, {self.value}!"
        kind = rng.random()
        if kind < 0.6:
            return f"I will remember that {joined}"
        if kind < 0.75:
            return f"Thank you for telling me that {joined}"
        return "Thank you. I will remember that."


def with_article(noun: str) -> str:
    """``noun`` after "a" or "an"."""
    return f"an {noun}" if noun[0].lower() in "aeiou" else f"a {noun}"


def _name_asks(noun: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    asks = (
        f"What is my {noun} called?",
        f"What is my {noun} called?",
        f"What's my {noun}'s name?",
        f"What is my {noun}'s name?",
        f"What is the name of my {noun}?",
        f"What's the name of my {noun}?",
        f"What was my {noun} called again?",
        f"What was the name of my {noun}?",
        f"How is my {noun} called?",
        f"Tell me the name of my {noun}.",
        f"I forgot the name of my {noun}.",
        f"So what is my {noun} called?",
        f"What did I call my {noun}?",
        f"And what is my {noun} called?",
        f"What is my {noun} named?",
        f"Now tell me what my {noun} is called.",
        f"What's my {noun} called?",
        f"And my {noun}?",
        f"Hello! What is my {noun} called?",
        f"What do I call my {noun}?",
        f"Please tell me my {noun}'s name.",
        f"What is the {noun} called?",
        f"What is the {noun}'s name?",
        f"What name does my {noun} have?",
    )
    yes_asks = (
        f"Do you remember what my {noun} is called?",
        f"Do you remember the name of my {noun}?",
        f"Can you tell me the name of my {noun}?",
        f"Do you know what my {noun} is called?",
        f"Do you remember my {noun}'s name?",
        f"Can you remember what my {noun} is called?",
        f"Do you still know the name of my {noun}?",
        f"Do you know my {noun}'s name?",
        f"Can you tell me what my {noun} is called?",
        f"Do you still remember my {noun}'s name?",
        f"Do you remember my {noun}?",
    )
    return asks, yes_asks


def named_fact(rng: Random, make_name: MakeName, noun: str, family: bool) -> Fact:
    """The name of a pet, a thing or a person: "My cat is called Zuzu."."""
    a_noun = with_article(noun)
    tells = [
        f"My {noun} is called {{v}}.",
        f"My {noun} is called {{v}}.",
        f"My {noun} is called {{v}}.",
        f"I have {a_noun} called {{v}}.",
        f"I have {a_noun} named {{v}}.",
        f"The name of my {noun} is {{v}}.",
        f"My {noun}'s name is {{v}}.",
        f"My {noun} is named {{v}}.",
        f"We have {a_noun} called {{v}}.",
        f"Please remember that my {noun} is called {{v}}.",
        f"I call my {noun} {{v}}.",
        f"You should know that my {noun} is called {{v}}.",
        f"My {noun} has the name {{v}}.",
        f"I have {a_noun}. The name is {{v}}.",
        f"I want to tell you that my {noun} is called {{v}}.",
    ]
    if family:
        tells += [
            f"My {noun} is {{v}}.",
            f"This is my {noun}, {{v}}.",
            f"I have {a_noun}. Meet {{v}}.",
            f"My {noun} {{v}} is here.",
            f"I was with my {noun} {{v}} today.",
            f"My {noun} {{v}} lives in {rng.choice(phrases.CITIES)}.",
        ]
    else:
        tells += [
            f"I have {a_noun}. It is called {{v}}.",
            f"I have a new {noun}. I call it {{v}}.",
            f"I got a new {noun} called {{v}}.",
            f"We named our {noun} {{v}}.",
            f"I have {a_noun} and it is called {{v}}.",
            f"I named my {noun} {{v}}.",
            f"My {noun} {{v}} is nice.",
            f"This is my {noun}, {{v}}.",
            f"I love my {noun} {{v}}.",
        ]
    asks, yes_asks = _name_asks(noun)
    if family:
        asks += (f"Who is my {noun}?", f"Who is my {noun}?")
    return Fact(
        noun,
        make_name(rng),
        tuple(tells),
        asks,
        yes_asks,
        f"Your {noun} is called {{v}}.",
    )


def own_name_fact(rng: Random, make_name: MakeName) -> Fact:
    """The user's own name."""
    return Fact(
        "own name",
        make_name(rng),
        (
            "My name is {v}.",
            "My name is {v}.",
            "I am {v}.",
            "I'm {v}.",
            "Call me {v}.",
            "You can call me {v}.",
            "I am called {v}.",
            "My name's {v}.",
            "People call me {v}.",
            "Hi, I'm {v}.",
            "Hello, my name is {v}.",
        ),
        (
            "What is my name?",
            "What is my name?",
            "What's my name?",
            "Who am I?",
            "What am I called?",
            "Tell me my name.",
            "And what is my name?",
            "What was my name?",
            "So what is my name?",
        ),
        (
            "Do you remember my name?",
            "Do you know my name?",
            "Do you remember who I am?",
            "Do you know who I am?",
            "Can you tell me my name?",
            "Do you still know my name?",
            "Do you remember what I am called?",
        ),
        "Your name is {v}.",
        greets=True,
    )


def attribute_fact(rng: Random, make_name: MakeName) -> Fact:
    """A favourite or another attribute: "My favourite colour is blue."."""
    if rng.random() < 0.65:
        short = rng.choice(sorted(phrases.FAVOURITES))
        values = phrases.FAVOURITES[short]
        value = rng.choice(values) if values and rng.random() < 0.9 else make_name(rng)
        noun = f"{rng.choice(['favourite', 'favorite'])} {short}"
        key = f"favourite {short.replace('color', 'colour')}"
    else:
        noun = key = rng.choice(sorted(phrases.ATTRIBUTES))
        kind = phrases.ATTRIBUTES[noun]
        value = {
            "number": str(rng.randint(1, 10 ** rng.randint(1, 6))),
            "hobby": rng.choice(phrases.HOBBIES),
            "sign": rng.choice(phrases.SIGNS),
            "date": f"on {rng.randint(1, 28)} {rng.choice(phrases.MONTHS)}",
        }.get(kind) or make_name(rng)
    return Fact(
        key,
        value,
        (
            f"My {noun} is {{v}}.",
            f"My {noun} is {{v}}.",
            f"Please remember that my {noun} is {{v}}.",
            f"You should know that my {noun} is {{v}}.",
            f"I want to tell you that my {noun} is {{v}}.",
        ),
        (
            f"What is my {noun}?",
            f"What is my {noun}?",
            f"What's my {noun}?",
            f"Tell me my {noun}.",
            f"What was my {noun}?",
            f"And what is my {noun}?",
            f"I forgot my {noun}.",
            f"And my {noun}?",
        ),
        (
            f"Do you remember my {noun}?",
            f"Do you know my {noun}?",
            f"Can you tell me my {noun}?",
            f"Do you remember what my {noun} is?",
            f"Do you still know my {noun}?",
            f"Do you know what my {noun} is?",
        ),
        f"Your {noun} is {{v}}.",
    )


def colour_fact(rng: Random) -> Fact:
    """The colour of an animal or a thing."""
    noun = rng.choice([*phrases.PETS, *phrases.THINGS])
    colour = rng.choice(["colour", "color"])
    return Fact(
        f"colour of {noun}",
        rng.choice(phrases.COLOURS),
        (f"My {noun} is {{v}}.", f"The {colour} of my {noun} is {{v}}.", f"I painted my {noun} {{v}}."),
        (
            f"What {colour} is my {noun}?",
            f"What is the {colour} of my {noun}?",
            f"Which {colour} is my {noun}?",
        ),
        (f"Do you remember what {colour} my {noun} is?", f"Do you know the {colour} of my {noun}?"),
        f"Your {noun} is {{v}}.",
    )


def _place_fact(kind: int, place: str) -> Fact:
    """Where somebody lives (0), comes from (1) or works (any other)."""
    if kind == 0:
        return Fact(
            "live",
            place,
            ("I live in {v}.", "I live in {v}.", "My home is in {v}.", "I moved to {v}."),
            (
                "Where do I live?",
                "Where do I live?",
                "Where is my home?",
                "What city do I live in?",
                "In which town do I live?",
                "Tell me where I live.",
            ),
            ("Do you remember where I live?", "Do you know where I live?", "Can you tell me where I live?"),
            "You live in {v}.",
            missing=PLACE_UNTOLD,
        )
    if kind == 1:
        return Fact(
            "from",
            place,
            ("I come from {v}.", "I am from {v}.", "I'm from {v}.", "I was born in {v}."),
            ("Where do I come from?", "Where am I from?", "Where was I born?"),
            ("Do you remember where I come from?", "Do you know where I am from?"),
            "You come from {v}.",
            missing=PLACE_UNTOLD,
        )
    return Fact(
        "work",
        place,
        ("I work at {v}.", "I work for {v}.", "My company is {v}."),
        ("Where do I work?", "Which company do I work for?", "What company do I work for?"),
        ("Do you remember where I work?", "Do you know where I work?"),
        "You work at {v}.",
        missing=PLACE_UNTOLD,
    )


def life_fact(rng: Random, make_name: MakeName) -> Fact:
    """Where somebody lives or comes from, what they do, how old they are."""
    place = rng.choice(phrases.CITIES) if rng.random() < 0.5 else make_name(rng)
    kind = rng.randrange(5)
    if kind == 2:
        job = with_article(rng.choice(phrases.JOBS))
        return Fact(
            "job",
            job,
            ("I work as {v}.", "I am {v}.", "I'm {v}.", "I work as {v}."),
            (
                "What is my job?",
                "What do I do?",
                "What do I do for a living?",
                "What do I work as?",
                "What's my job?",
                "What is my profession?",
            ),
            ("Do you remember my job?", "Do you know what I do?", "Do you remember what I work as?"),
            "You work as {v}.",
        )
    if kind == 3:
        return Fact(
            "age",
            str(rng.randint(6, 99)),
            ("I am {v} years old.", "I'm {v} years old.", "I am {v}."),
            ("How old am I?", "What is my age?", "How old am I?"),
            ("Do you remember how old I am?", "Do you know how old I am?"),
            "You are {v} years old.",
            missing="some number of",
        )
    return _place_fact(kind, place)


@dataclass(frozen=True)
class FactMaker:
    """Draws facts; the names come from ``make_name``."""

    make_name: MakeName

    def fact(self, rng: Random) -> Fact:
        """Any kind of fact."""
        kind = rng.random()
        if kind < 0.6:
            return self.named(rng)
        if kind < 0.7:
            return own_name_fact(rng, self.make_name)
        if kind < 0.84:
            return attribute_fact(rng, self.make_name)
        if kind < 0.88:
            return colour_fact(rng)
        return life_fact(rng, self.make_name)

    def named(self, rng: Random) -> Fact:
        """The name of a pet, a person or a thing; now and then of a thing with a made-up word for it."""
        kind = rng.random()
        if kind < 0.38:
            return named_fact(rng, self.make_name, rng.choice(phrases.PETS), family=False)
        if kind < 0.7:
            return named_fact(rng, self.make_name, rng.choice(phrases.FAMILY), family=True)
        if kind < 0.92:
            return named_fact(rng, self.make_name, rng.choice(phrases.THINGS), family=False)
        return self.made_up(rng)

    def made_up(self, rng: Random) -> Fact:
        """The name of a thing whose noun is made up too, and so must be copied from the question."""
        return named_fact(rng, self.make_name, self.make_name(rng).lower(), family=False)
