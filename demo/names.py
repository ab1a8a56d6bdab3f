"""Made-up names, of which a part is held out from training. Pure and seeded; no torch.

Every name that a training conversation uses passes ``is_held_out(...) == False``; the recall check uses only
names for which it is true, so no name of the check was ever seen in training.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from random import Random

from demo import phrases


def is_held_out(name: str) -> bool:
    """True when any word of ``name`` belongs to the eighth of all words that training never uses."""
    return any(zlib.crc32(word.lower().encode()) % 8 == 0 for word in name.split())


_ONSETS = phrases.words("b|c|d|f|g|h|j|k|l|m|n|p|r|s|t|v|w|z|br|ch|cl|dr|fl|gr|kr|pl|qu|sh|sl|st|th|tr|y|x")
_VOWELS = phrases.words("a|e|i|o|u|a|e|i|o|u|a|e|i|o|u|ai|ea|ee|ia|io|oo|ou|y")
_CODAS = ["", "", "", "", "", *phrases.words("l|n|r|s|t|x|m|k|ck|nd|rt|sh|ss|th")]


def syllable_name(rng: Random, shortest: int = 3, longest: int = 10) -> str:
    """A capitalised name of random syllables, ``shortest`` to ``longest`` letters long."""
    target = rng.randint(shortest, longest)
    while True:
        word = rng.choice(_VOWELS) if rng.random() < 0.2 else ""
        while len(word) < target:
            word += rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
        if shortest <= len(word) <= longest:
            return word.capitalize()


def doubled_name(rng: Random) -> str:
    """A name that says a syllable twice, such as Bobo or Zuzu. Harder to copy: where does the end come?"""
    syllable = rng.choice(_ONSETS) + rng.choice(_VOWELS)
    ending = rng.choice(_CODAS) if rng.random() < 0.2 else ""
    return (syllable * (3 if rng.random() < 0.08 else 2) + ending).capitalize()


def held_out_name(rng: Random, shortest: int = 3, longest: int = 10) -> str:
    """A syllable name that training never uses."""
    while True:
        name = doubled_name(rng) if rng.random() < 0.08 else syllable_name(rng, shortest, longest)
        if is_held_out(name):
            return name


def training_name(rng: Random) -> str:
    """A name for training: mostly syllables, some common names, letter salad, two words, other scripts."""
    while True:
        kind = rng.random()
        if kind < 0.68:
            name = syllable_name(rng)
        elif kind < 0.86:
            name = rng.choice(phrases.REAL_NAMES)
        elif kind < 0.91:
            name = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 10))).capitalize()
        elif kind < 0.96:
            first = rng.choice(["Captain", "Miss", "Mr", "Lady", "Old", "Little", *phrases.REAL_NAMES])
            name = f"{first} {syllable_name(rng)}"
        else:
            name = rng.choice(phrases.UNICODE_NAMES)
        case = rng.random()
        name = name.lower() if case < 0.06 else name.upper() if case < 0.13 else name
        if not is_held_out(name):
            return name


@dataclass(frozen=True)
class NameMix:
    """Training names of which a share is doubled and a share of all is in capitals: both are hard to copy."""

    doubled: float = 0.0
    capitals: float = 0.0

    def __call__(self, rng: Random) -> str:
        """One name."""
        name = self._name(rng)
        return name.upper() if self.capitals and rng.random() < self.capitals else name

    def _name(self, rng: Random) -> str:
        if not self.doubled or rng.random() >= self.doubled:
            return training_name(rng)
        while True:
            name = doubled_name(rng)
            if not is_held_out(name):
                return name.lower() if rng.random() < 0.1 else name


PLAIN_NAMES = NameMix()
