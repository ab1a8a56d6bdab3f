from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from services.ledger.saga import (
    TRIES_AFTER_SWITCH,
    TRIES_BEFORE_SWITCH,
    AskDebtors,
    DebtorAnswer,
    DebtorRequest,
    Leg,
    Pause,
    Settlement,
    Step,
    Steps,
    WriteSettlement,
    settle,
    take_over,
)

GONE = DebtorAnswer(refused=True)
SILENT = DebtorAnswer()


def circle(*blocks: int, round_blocks: int = 2) -> Settlement:
    names = "abc"[: len(blocks)]
    legs = tuple(
        Leg(debtor=name, creditor=names[(at + 1) % len(names)], left_blocks=blocks[at])
        for at, name in enumerate(names)
    )
    return Settlement(id="s", term=3, legs=legs, round_blocks=round_blocks)


def obey(request: DebtorRequest) -> DebtorAnswer:
    return DebtorAnswer(blocks=request.blocks if request.step <= Step.FREEZE else 1)


class Play:
    """Runs a saga against debtors that `answer`; `writes_max`: after so many writes another leader wrote."""

    def __init__(
        self,
        steps: Steps,
        answer: Callable[[str, DebtorRequest], DebtorAnswer],
        writes_max: int | None = None,
    ) -> None:
        self.written: list[Settlement | None] = []
        self.asked: list[tuple[Step, int, str]] = []
        self.reported: list[str] = []  # what happened, in order
        self.result: Settlement | None = None
        value: object = None
        while True:
            try:
                effect = steps.send(value)
            except StopIteration as stop:
                self.result = stop.value
                return
            match effect:
                case WriteSettlement(settlement=settlement):
                    value = writes_max is None or len(self.written) < writes_max
                    if value:
                        self.written.append(settlement)
                        self.reported.append(f"wrote {settlement.step.name if settlement else 'nothing'}")
                case AskDebtors(requests=requests):
                    for name, request in requests.items():
                        self.asked.append((request.step, request.round, name))
                        self.reported.append(f"asked {request.step.name}")
                    value = {name: answer(name, request) for name, request in requests.items()}
                case Pause():
                    value = None

    def steps(self, name: str) -> list[tuple[Step, int]]:
        return [(step, number) for step, number, debtor in self.asked if debtor == name]


def test_a_circle_turns_in_rounds_until_its_debt_is_settled() -> None:
    play = Play(settle(circle(5, 5, 5)), lambda _, request: obey(request))
    rounds = [
        (step, number) for number in (1, 2, 3) for step in (Step.FREEZE, Step.COPY, Step.SWITCH, Step.RELEASE)
    ]
    for name in "abc":
        assert play.steps(name) == [(Step.PREPARE, 0), *rounds, (Step.END, 0)]
    assert play.result is not None
    assert [leg.settled_blocks for leg in play.result.legs] == [5, 5, 5]
    assert play.written[-1] is None


def test_each_step_is_written_before_it_is_taken() -> None:
    play = Play(settle(circle(2, 2)), lambda _, request: obey(request))
    written = ""
    for entry in play.reported:
        word, _, step = entry.partition(" ")
        if word == "wrote":
            written = step
        else:
            assert step == written


def test_amounts_are_those_that_were_agreed_when_frozen() -> None:
    def answer(name: str, request: DebtorRequest) -> DebtorAnswer:
        if request.step is Step.FREEZE and name == "b":
            return DebtorAnswer(blocks=1 if request.round == 1 else 0)
        return obey(request)

    play = Play(settle(circle(4, 4)), answer)
    assert play.result is not None
    assert [leg.settled_blocks for leg in play.result.legs] == [4, 1]


def test_before_the_switch_it_is_given_up_when_one_does_not_follow() -> None:
    for stubborn in (Step.PREPARE, Step.FREEZE, Step.COPY):
        for refusal in (GONE, SILENT):

            def answer(
                name: str, request: DebtorRequest, stubborn: Step = stubborn, refusal: DebtorAnswer = refusal
            ) -> DebtorAnswer:
                return refusal if (name, request.step) == ("b", stubborn) else DebtorAnswer(blocks=1)

            play = Play(settle(circle(4, 4)), answer)
            assert Step.SWITCH not in [step for step, _, _ in play.asked]
            assert play.steps("a")[-1] == play.steps("b")[-1] == (Step.END, 0)
            tries = TRIES_BEFORE_SWITCH if refusal is SILENT else 1
            assert [step for step, _, name in play.asked if name == "b"].count(stubborn) == tries
            assert play.written[-1] is None


def test_after_the_switch_it_is_finished_and_nobody_waits_for_ever() -> None:
    def answer(name: str, request: DebtorRequest) -> DebtorAnswer:
        return SILENT if name == "b" and request.step >= Step.SWITCH else DebtorAnswer(blocks=1)

    play = Play(settle(circle(1, 1)), answer)
    assert play.steps("b").count((Step.SWITCH, 1)) == TRIES_AFTER_SWITCH
    assert play.steps("a")[-3:] == [(Step.SWITCH, 1), (Step.RELEASE, 1), (Step.END, 0)]
    assert play.written[-1] is None


def test_without_any_room_nothing_begins() -> None:
    play = Play(settle(circle(3, 3)), lambda _, request: DebtorAnswer(blocks=0))
    assert [step for step, _ in play.steps("a")] == [Step.PREPARE, Step.END]


def test_one_without_room_waits_for_what_the_others_clear() -> None:
    """b has nothing set aside until a has brought its first block home from it."""

    def answer(name: str, request: DebtorRequest) -> DebtorAnswer:
        if name == "b" and (request.step is Step.PREPARE or request.round == 1):
            return DebtorAnswer(blocks=0)
        return DebtorAnswer(blocks=min(request.blocks, 1) if request.step is Step.FREEZE else 1)

    play = Play(settle(circle(2, 2)), answer)
    assert play.result is not None
    assert [leg.settled_blocks for leg in play.result.legs] == [2, 2]


def test_a_new_leader_undoes_before_the_first_switch_and_finishes_after_it() -> None:
    for step, expected in (
        (Step.PREPARE, [Step.END]),
        (Step.FREEZE, [Step.END]),
        (Step.COPY, [Step.END]),
        (Step.SWITCH, [Step.SWITCH, Step.RELEASE, Step.END]),
        (Step.RELEASE, [Step.RELEASE, Step.END]),
        (Step.END, [Step.END]),
    ):
        record = replace(circle(4, 4), step=step, round=2)
        play = Play(take_over(record, 9), lambda _, request: obey(request))
        assert [taken for taken, _ in play.steps("a")] == expected
        assert all(one is None or one.term == 9 for one in play.written)


def test_who_cannot_write_stops_at_once() -> None:
    whole = Play(settle(circle(2, 2)), lambda _, request: obey(request))
    for writes in range(len(whole.written)):
        play = Play(settle(circle(2, 2)), lambda _, request: obey(request), writes)
        assert play.result is None
        steps = [one.step for one in play.written if one is not None]
        assert {step for step, _, _ in play.asked} == set(steps)
