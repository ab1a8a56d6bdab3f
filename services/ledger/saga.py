"""A settlement as steps without I/O (Infinite-LLM, section 4.5; docs/commons.md has the protocol and why it
holds).

Each leg of the circle brings blocks of its debtor home from its creditor, in rounds: nobody may have room for
all of it, so each debtor has a few blocks set aside, and what one leg clears at a creditor is what this one's
own next round comes home to. A round is agreed and copied before any of it is switched. Every step is written
to etcd before it is taken, so whoever leads next knows how far it may have got: before the switch of a round
it is undone, after it finished.

`settle` and `take_over` are generators; the shell carries out what they yield and sends the result back:

- `WriteSettlement`: True if it was written, False if another leader has written meanwhile (then the saga is
  theirs)
- `AskDebtors`: by debtor its `DebtorAnswer`
- `Pause`: None
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TypeAlias

# Tries of a step that may still be given up; then the round is undone.
TRIES_BEFORE_SWITCH = 2
# Tries of a step that all have to take: far longer than a participant waits for its leader.
TRIES_AFTER_SWITCH = 8
ROUNDS_MAX = 1_000


class Step(IntEnum):
    """As in ledger.proto."""

    PREPARE = 0
    FREEZE = 1
    COPY = 2
    SWITCH = 3
    RELEASE = 4
    END = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    debtor: str
    creditor: str
    left_blocks: int
    settled_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """As in ledger.proto."""

    id: str
    term: int
    legs: tuple[Leg, ...]
    round_blocks: int
    step: Step = Step.PREPARE
    round: int = 0

    @property
    def participants(self) -> frozenset[str]:
        return frozenset(name for leg in self.legs for name in (leg.debtor, leg.creditor))


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteSettlement:
    """Writes the settlement's record; None deletes it."""

    settlement: Settlement | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DebtorRequest:
    """The request of one step to one debtor. The step says which fields count."""

    step: Step
    settlement: str
    term: int
    round: int = 0
    creditor: str = ""
    blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DebtorAnswer:
    """A debtor's answer. `refused`: the debtor does not know the settlement, has undone it, or is gone;
    asking again is of no use. Neither blocks nor refused: no answer came."""

    blocks: int | None = None
    refused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AskDebtors:
    requests: Mapping[str, DebtorRequest]  # by debtor


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    pass


Effect: TypeAlias = WriteSettlement | AskDebtors | Pause
Steps: TypeAlias = Generator[Effect, object, Settlement | None]


def settle(settlement: Settlement) -> Steps:
    """A new settlement; returns how it ended, None where another leader has taken it over."""
    if not (yield WriteSettlement(settlement=settlement)):
        return None
    set_aside = yield from _ask(settlement, TRIES_BEFORE_SWITCH)
    if not _all_take(settlement, set_aside):
        return (yield from _end(settlement))
    while any(leg.left_blocks for leg in settlement.legs) and settlement.round < ROUNDS_MAX:
        ran = yield from _round(replace(settlement, round=settlement.round + 1))
        if ran is None:
            return None
        settlement, went_on = ran
        if not went_on:
            break
    return (yield from _end(settlement))


def take_over(record: Settlement, term: int) -> Steps:
    """What a new leader does with a settlement that it finds: it ends it, and first finishes its round if any
    debtor may have switched. The rest of the debts is found again."""
    settlement = replace(record, term=term)
    if record.step in (Step.SWITCH, Step.RELEASE):
        finished = yield from _finish(settlement)
        if finished is None:
            return None
        settlement = finished
    return (yield from _end(settlement))


def _round(
    settlement: Settlement,
) -> Generator[Effect, object, tuple[Settlement, bool] | None]:
    """One round; False with it where the circle does not go on."""
    settlement = replace(settlement, step=Step.FREEZE)
    if not (yield WriteSettlement(settlement=settlement)):
        return None
    agreed = yield from _ask(settlement, TRIES_BEFORE_SWITCH)
    if not _all_take(settlement, agreed):
        return settlement, False
    settlement = replace(settlement, step=Step.COPY)
    if not (yield WriteSettlement(settlement=settlement)):
        return None
    copied = yield from _ask(settlement, TRIES_BEFORE_SWITCH)
    if not _all_take(settlement, copied):
        return settlement, False
    settlement = replace(
        settlement,
        step=Step.SWITCH,
        legs=tuple(_paid(leg, agreed[leg.debtor]) for leg in settlement.legs),
    )
    finished = yield from _finish(settlement)
    return None if finished is None else (finished, True)


def _finish(settlement: Settlement) -> Steps:
    """A round from its switch on: whoever does not answer is gone, or will finish or undo it by itself."""
    for step in (Step.SWITCH, Step.RELEASE):
        if step < settlement.step:
            continue
        settlement = replace(settlement, step=step)
        if not (yield WriteSettlement(settlement=settlement)):
            return None
        yield from _ask(settlement, TRIES_AFTER_SWITCH)
    return settlement


def _end(settlement: Settlement) -> Steps:
    """Undoes what was not switched, and gives back what was set aside."""
    settlement = replace(settlement, step=Step.END)
    if not (yield WriteSettlement(settlement=settlement)):
        return None
    yield from _ask(settlement, TRIES_AFTER_SWITCH)
    if not (yield WriteSettlement(settlement=None)):
        return None
    return settlement


def _all_take(settlement: Settlement, blocks: Mapping[str, int]) -> bool:
    """All are there, and something moves. One that has no block for this round waits for what the leg before
    it clears; where nobody moves anything any more, the debts are gone or there is no room at all."""
    return all(leg.debtor in blocks for leg in settlement.legs) and any(blocks.values())


def _paid(leg: Leg, blocks: int) -> Leg:
    return replace(
        leg,
        left_blocks=max(0, leg.left_blocks - blocks),
        settled_blocks=leg.settled_blocks + blocks,
    )


def _ask(settlement: Settlement, tries: int) -> Generator[Effect, object, dict[str, int]]:
    """The blocks that each debtor answered, without those that refused or did not answer."""
    waiting = {leg.debtor: leg for leg in settlement.legs}
    blocks: dict[str, int] = {}
    for attempt in range(tries):
        if attempt:
            yield Pause()
        requests = {name: _request(settlement, leg) for name, leg in waiting.items()}
        answers = yield AskDebtors(requests=requests)
        assert isinstance(answers, Mapping)
        for name, answer in answers.items():
            if answer.blocks is not None:
                blocks[name] = answer.blocks
            if answer.refused or answer.blocks is not None:
                waiting.pop(name, None)
        given_up = settlement.step < Step.SWITCH and any(answer.refused for answer in answers.values())
        if not waiting or given_up:
            break
    return blocks


def _request(settlement: Settlement, leg: Leg) -> DebtorRequest:
    request = DebtorRequest(step=settlement.step, settlement=settlement.id, term=settlement.term)
    match settlement.step:
        case Step.PREPARE:
            return replace(request, blocks=min(settlement.round_blocks, leg.left_blocks))
        case Step.FREEZE:
            blocks = min(settlement.round_blocks, leg.left_blocks)
            return replace(request, round=settlement.round, creditor=leg.creditor, blocks=blocks)
        case Step.END:
            return request
        case _:
            return replace(request, round=settlement.round)


def busy(settlements: Iterable[Settlement]) -> frozenset[str]:
    """Instances that a settlement is under way with."""
    return frozenset(name for one in settlements for name in one.participants)
