"""Conversations in which facts are told and asked for later. Pure and seeded; no torch.

A conversation is a list of ``Message``. No name in it is one that the recall check uses (``demo.names``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from demo import phrases
from demo.facts import Fact, FactMaker, with_article
from demo.names import PLAIN_NAMES, NameMix

Count = Callable[[str], int]
# What the template puts around a message: start, role, newline, end, newline.
MESSAGE_OVERHEAD = 5


@dataclass(frozen=True)
class Message:
    """One turn; ``states`` holds the facts whose values an assistant's message states."""

    role: str
    content: str
    states: tuple[Fact, ...] = ()


def sentence(rng: Random) -> str:
    """A plain English sentence about nothing that matters."""
    parts = [rng.choice(phrases.SUBJECTS), rng.choice(phrases.VERBS), rng.choice(phrases.OBJECTS)]
    if rng.random() < 0.6:
        parts.append(rng.choice(phrases.TIMES))
    if rng.random() < 0.25:
        parts.append(f"and {rng.choice(phrases.VERBS)} {rng.choice(phrases.OBJECTS)}")
    return " ".join(parts) + "."


def long_text(rng: Random, count: Count, tokens: int) -> list[Message]:
    """The user pastes a text of about ``tokens`` tokens; the assistant says that it has read it."""
    opening = rng.choice(
        [
            "Here is a text.",
            "Please read this:",
            "I want to tell you a story.",
            "Listen to this.",
            "This is what I wrote today.",
            "",
            "",
            "Let me tell you about my day.",
        ]
    )
    # Sometimes words in no order: what people paste is not always prose of the kind made here.
    words = " ".join(
        [*phrases.SUBJECTS, *phrases.VERBS, *phrases.OBJECTS, *phrases.PETS, *phrases.THINGS]
    ).split()
    shuffled = rng.random() < 0.15
    text = opening
    while count(text) < tokens:
        piece = " ".join(rng.choices(words, k=12)) if shuffled else sentence(rng)
        text = f"{text} {piece}".strip()
    return [Message("user", text), Message("assistant", "Thank you for telling me.")]


def _statement(rng: Random) -> list[Message]:
    """An open remark and a reply that takes one word of it up."""
    place, food, doing = rng.choice(phrases.PLACES), rng.choice(phrases.FOODS), rng.choice(phrases.ACTIVITIES)
    said, reply = rng.choice(
        [
            (
                rng.choice(
                    [
                        f"Today I went to the {place}.",
                        f"I was at the {place} yesterday.",
                        f"We are going to the {place}.",
                        f"I want to go to the {place}.",
                    ]
                ),
                f"That sounds nice. I hope that you enjoy the {place}.",
            ),
            (
                rng.choice(
                    [
                        f"I like {food}.",
                        f"I had {food} for lunch.",
                        f"I love {food}.",
                        f"We ate {food} today.",
                    ]
                ),
                f"That sounds good. Many people like {food}.",
            ),
            (
                rng.choice([f"I like to {doing}.", f"I want to {doing}.", f"I love to {doing} at home."]),
                f"It is good to {doing} when you have time.",
            ),
            (sentence(rng), "That is interesting. Please tell me more."),
            (f"{sentence(rng)} {sentence(rng)}", "Thank you for telling me."),
            (
                rng.choice([f"Do you like {food}?", f"Can you {doing}?", f"Do you like to {doing}?"]),
                "I am only a small model, so I cannot do that.",
            ),
            (f"What do you think about {rng.choice([food, 'the ' + place])}?", "I think that it is nice."),
        ]
    )
    return [Message("user", said), Message("assistant", reply)]


def small_talk(rng: Random) -> list[Message]:
    """One short exchange without a fact: [user, assistant]."""
    kind = rng.random()
    if kind < 0.33:
        return _statement(rng)
    said, answers = rng.choice(phrases.SMALL_TALK)
    return [Message("user", _casual(rng, rng.choice(said))), Message("assistant", rng.choice(answers))]


def _casual(rng: Random, text: str) -> str:
    """``text`` as typed by somebody in a hurry, now and then: lower case, no full stop."""
    kind = rng.random()
    if kind < 0.12:
        text = text.lower()
    if kind < 0.07 or kind > 0.93:
        text = text.rstrip(".?!") or text
    return text.replace("'", "") if kind < 0.04 else text


def system_message(rng: Random) -> list[Message]:
    """Nothing, or one system message."""
    if rng.random() < 0.45:
        return []
    return [Message("system", " ".join(rng.sample(phrases.SYSTEM_PROMPTS, rng.choice([1, 1, 1, 2]))))]


@dataclass
class _Open:
    """A fact that was told, and the position from which it may be asked for again."""

    fact: Fact
    due: float


@dataclass
class Writer:
    """Writes one training conversation of at least ``tokens`` tokens.

    ``hard`` adds what would only confuse a model that does not copy well yet: two names in one clause.
    ``untold`` is the share of turns, from the first on, that ask for something never told.
    """

    rng: Random
    count: Count
    tokens: int
    maker: FactMaker
    hard: bool = False
    untold: float = 0.0
    messages: list[Message] = field(default_factory=list)
    used: int = 0
    told: dict[str, _Open] = field(default_factory=dict)

    def add(self, messages: Sequence[Message]) -> None:
        self.messages.extend(messages)
        self.used += sum(self.count(message.content) + MESSAGE_OVERHEAD for message in messages)

    def _due(self) -> float:
        # Half of the waits are short on a logarithmic scale, half are spread evenly to the end.
        if self.rng.random() < 0.5:
            return self.used + 30 * math.pow(self.tokens / 30, self.rng.random())
        return self.used + self.rng.random() * self.tokens

    def tell(self) -> None:
        fresh = [fact for fact in (self.maker.fact(self.rng) for _ in range(4)) if fact.key not in self.told]
        count = 2 if self.rng.random() < 0.12 else 1
        facts = list({fact.key: fact for fact in fresh[:count]}.values())
        if not facts:
            return
        style = self.rng.random()
        if style < 0.1:
            facts = [fact.lowered() for fact in facts]
        said = " and ".join(fact.tell(self.rng).rstrip(".") for fact in facts) + "."
        said = said.replace(" and My ", " and my ")
        if style < 0.1:
            said = said.lower()
        if style < 0.05 or style > 0.94:
            said = said.rstrip(".")
        elif self.rng.random() < 0.12:
            said = f"{said} {self.rng.choice(phrases.AFTERTHOUGHTS)}"
        if style > 0.5 and self.rng.random() < 0.3:
            before = self.rng.choice(["Hello!", "Hi!", "By the way,", "Listen:", "Okay.", sentence(self.rng)])
            said = f"{before} {said}"
        ask_now = len(facts) == 1 and self.rng.random() < 0.05
        fact = facts[0]
        if ask_now:
            ask, answer = fact.ask(self.rng)
            reply = Message("assistant", answer, states=(fact,))
            said = f"{said.rstrip('.')}. {ask}"
        else:
            reply = Message("assistant", fact.acknowledge(self.rng, facts), states=tuple(facts))
        self.add([Message("user", said), reply])
        for fact in facts:
            self.told[fact.key] = _Open(fact, self._due())

    def tell_pair(self) -> None:
        """Two names in one sentence: "I have a cat called Mimi and a dog called Bobo."."""
        first, second = self.maker.named(self.rng), self.maker.named(self.rng)
        if first.key == second.key or first.key in self.told or second.key in self.told:
            return
        one, other = with_article(first.key), with_article(second.key)
        pattern = self.rng.choice(
            [
                f"I have {one} called {{a}} and {other} called {{b}}.",
                f"I have {one} named {{a}} and {other} named {{b}}.",
                f"We have {one} called {{a}} and {other} called {{b}}.",
                f"My {first.key} is called {{a}} and my {second.key} {{b}}.",
                f"My {first.key} is {{a}} and my {second.key} is {{b}}.",
                f"I have two friends: {one} called {{a}} and {other} called {{b}}.",
                f"I have two pets, {one} called {{a}} and {other} called {{b}}.",
            ]
        )
        said = pattern.format(a=first.value, b=second.value)
        reply = first.acknowledge(self.rng, [first, second])
        self.add([Message("user", said), Message("assistant", reply, states=(first, second))])
        for fact in (first, second):
            self.told[fact.key] = _Open(fact, self._due())

    def ask(self, open_fact: _Open) -> None:
        fact = open_fact.fact
        said, answer = fact.ask(self.rng)
        said = _casual(self.rng, said)
        self.add([Message("user", said), Message("assistant", answer, states=(fact,))])
        open_fact.due = self._due()

    def ask_untold(self) -> None:
        fact = self.maker.fact(self.rng)
        if fact.key not in self.told:
            fact = fact.without_value()
            said, answer = fact.ask(self.rng)
            self.add([Message("user", _casual(self.rng, said)), Message("assistant", answer, (fact,))])

    def filler(self, long_rate: float) -> None:
        """Small talk or, at ``long_rate``, a text of any length up to a third of the conversation."""
        if self.rng.random() < long_rate:
            length = int(20 * (self.tokens / 60) ** self.rng.random())
            self.add(long_text(self.rng, self.count, length))
        else:
            self.add(small_talk(self.rng))

    def write_far(self, untold: float) -> list[Message]:
        """Facts at the start, questions at the end, a share of ``untold`` more for what was never told."""
        self.add(system_message(self.rng))
        most = self.rng.choice([4, 6, 8, 10, 14])
        early = self.tokens * self.rng.uniform(0.08, 0.25)
        while self.used < early and len(self.told) < most:
            if self.rng.random() < 0.2:
                self.add(small_talk(self.rng))
            elif self.rng.random() < 0.12:
                self.tell_pair()
            else:
                self.tell()
        exam = self.tokens - 25 * len(self.told)
        long_rate = self.rng.choice([0.0, 0.1, 0.3, 0.8])
        while self.used < exam:
            self.filler(long_rate)
        while self.used < self.tokens:
            for item in self.rng.sample(list(self.told.values()), len(self.told)):
                self.ask(item)
                if untold and self.rng.random() < untold:
                    self.ask_untold()
        return self.messages

    def write(self) -> list[Message]:
        self.add(system_message(self.rng))
        most = self.rng.choice([2, 3, 4, 6, 8, 10, 14])
        tell_rate = self.rng.choice([0.1, 0.2, 0.4, 0.8])
        long_rate = self.rng.choice([0.0, 0.1, 0.3])
        # The last stretch asks for everything once more: most of the long distances come from there.
        exam = self.tokens - 25 * min(most, self.tokens // 80)
        while self.used < self.tokens:
            due = [item for item in self.told.values() if item.due <= self.used or self.used >= exam]
            if due and self.rng.random() < 0.85:
                self.ask(self.rng.choice(due))
            elif self.untold and self.rng.random() < self.untold:
                self.ask_untold()
            elif not self.told or (len(self.told) < most and self.rng.random() < tell_rate):
                if self.hard and self.rng.random() < 0.12:
                    self.tell_pair()
                elif self.told or self.rng.random() < 0.6:
                    self.tell()
                else:
                    self.add(small_talk(self.rng))
            elif self.rng.random() < 0.08:
                self.ask_untold()
            else:
                self.filler(long_rate)
        return self.messages


def training_conversation(
    rng: Random,
    count: Count,
    tokens: int,
    hard: bool = False,
    names: NameMix = PLAIN_NAMES,
    untold: float = 0.0,
) -> list[Message]:
    """A conversation of at least ``tokens`` tokens in which facts are told and asked for."""
    return Writer(rng, count, tokens, FactMaker(names), hard, untold).write()


def far_conversation(
    rng: Random, count: Count, tokens: int, names: NameMix, untold: float = 0.0
) -> list[Message]:
    """A hard conversation of at least ``tokens`` tokens: facts at its start, questions at its end."""
    return Writer(rng, count, tokens, FactMaker(names), hard=True).write_far(untold)
