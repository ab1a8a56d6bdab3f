"""Measures how well a model recalls a told name over distance: ``python -m demo.recall --model DIR``.

Each case is a conversation: perhaps a system prompt, a fact with a name never seen in training, an
acknowledgement, which in three of four cases states it again, other facts and small talk, the question. The
distance is counted in tokens from the message that states the name last to the start of the answer. Two
figures are taken. Teacher-forced: each token of the name is the likeliest one, given the right answer so far.
Greedy: the generated answer contains the name exactly and comes to its end token.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from demo import phrases
from demo.conversations import (
    Message,
    long_text,
    small_talk,
    system_message,
)
from demo.facts import Fact, FactMaker, MakeName, own_name_fact
from demo.llama import Llama, load_model
from demo.names import held_out_name
from demo.tokens import ChatTokens

DISTANCES = (64, 128, 256, 512, 768, 1024, 1280, 1536, 1800)
COMMON_NOUNS = frozenset([*phrases.PETS, *phrases.FAMILY, *phrases.THINGS])
# Kinds of cases that are measured apart from the curve.
MADE_UP, UNNAMED = "made-up nouns", "an acknowledgement without the name"
CAPITALS, LOWER_CASE = "names in capitals", "names in lower case"
TABLE_START, TABLE_END = "<!-- recall table -->", "<!-- end of recall table -->"


@dataclass(frozen=True)
class Case:
    """One conversation up to the question, and the right answer."""

    messages: list[Message]
    fact: Fact
    answer: str
    distance: int


@dataclass(frozen=True)
class Result:
    """How the model did on one case."""

    distance: int
    forced: bool
    greedy: bool
    ended: bool
    exact: bool
    said: str
    wanted: str
    system: bool
    name: str


def _namer(kind: str) -> MakeName:
    """Held-out names, written as names are unless ``kind`` says otherwise."""
    if kind == CAPITALS:
        return lambda rng: held_out_name(rng).upper()
    if kind == LOWER_CASE:
        return lambda rng: held_out_name(rng).lower()
    return held_out_name


def _common_fact(rng: Random, maker: FactMaker, make_name: MakeName) -> Fact:
    """The user's own name or the name of something for which there is a listed noun."""
    if rng.random() < 0.15:
        return own_name_fact(rng, make_name)
    while True:
        fact = maker.named(rng)
        if fact.key in COMMON_NOUNS:
            return fact


def make_case(rng: Random, tokens: ChatTokens, distance: int, kind: str = "") -> Case:
    """A case whose fact was stated last about ``distance`` tokens before the answer.

    ``kind`` may be ``MADE_UP``, for a thing whose noun is a held-out word as well, ``UNNAMED``, for an
    acknowledgement that leaves the name out, ``CAPITALS`` or ``LOWER_CASE``, for how names are written.
    """
    make_name = _namer(kind)
    maker = FactMaker(make_name)
    fact = maker.made_up(rng) if kind == MADE_UP else _common_fact(rng, maker, make_name)
    acknowledgement = fact.acknowledge(rng, [fact])
    if kind == UNNAMED:
        acknowledgement = "Thank you. I will remember that."
    said, answer = fact.ask(rng)
    before = system_message(rng) + (small_talk(rng) if rng.random() < 0.5 else [])
    told = [Message("user", fact.tell(rng)), Message("assistant", acknowledgement)]
    question = Message("user", said)
    others = {other.key: other for other in (maker.fact(rng) for _ in range(rng.randrange(6)))}
    others.pop(fact.key, None)
    pieces: list[list[Message]] = []
    for other in others.values():
        pieces.append(
            [Message("user", other.tell(rng)), Message("assistant", other.acknowledge(rng, [other]))]
        )
    # From the end of the message that states the name last to the answer, without any piece in between.
    tail = (
        len(tokens.prompt([question]))
        if fact.value in acknowledgement
        else len(tokens.prompt([told[1], question]))
    )

    def length(turns: Sequence[list[Message]]) -> int:
        return tail + sum(len(tokens.prompt(turn)) - len(tokens.header("assistant")) for turn in turns)

    while pieces and length(pieces) > distance:
        pieces.pop()
    long_rate = rng.choice([0.0, 0.3, 0.9])
    while (left := distance - length(pieces)) > 20:
        if rng.random() < long_rate and left > 60:
            pieces.append(long_text(rng, tokens.count, rng.randint(20, left - 30)))
        else:
            pieces.append(small_talk(rng))
    while len(pieces) > 1 and length(pieces) > distance + 10:
        pieces.pop()
    rng.shuffle(pieces)
    between = [message for piece in pieces for message in piece]
    return Case([*before, *told, *between, question], fact, answer, length(pieces))


@torch.inference_mode()
def judge(model: Llama, tokens: ChatTokens, case: Case) -> Result:
    """Runs the model on ``case`` once teacher-forced and once greedily."""
    prompt = tokens.prompt(case.messages)
    hidden, cache = model(torch.tensor([prompt]))
    wanted = [*tokens.encode(case.answer), tokens.end]
    forced_hidden, _ = model(torch.tensor([wanted[:-1]]), cache)
    best = model.logits(torch.cat((hidden[0, -1:], forced_hidden[0]))).argmax(-1).tolist()
    name = tokens.encode(f" {case.fact.value}")
    first = next(at for at in range(len(wanted)) if wanted[at : at + len(name)] == name)
    forced = best[first : first + len(name)] == name
    out = model.go_on(hidden, cache, tokens.end, most=48)
    said = tokens.decode(out)
    found = re.search(rf"(?<!\w){re.escape(case.fact.value)}(?!\w)", said) is not None
    ended = bool(out) and out[-1] == tokens.end
    return Result(
        case.distance,
        forced,
        found and ended,
        ended,
        said == case.answer,
        said,
        case.answer,
        case.messages[0].role == "system",
        case.fact.value,
    )


def measure(
    model: Llama,
    tokens: ChatTokens,
    distance: int,
    cases: int,
    seed: int,
    until: float = math.inf,
    kind: str = "",
) -> list[Result]:
    """Results of up to ``cases`` cases at one distance, fewer when the clock passes ``until``."""
    results: list[Result] = []
    for index in range(cases):
        if time.monotonic() > until:
            break
        rng = Random(f"recall {seed} {distance} {index}")
        results.append(judge(model, tokens, make_case(rng, tokens, distance, kind)))
    return results


def measure_untold(model: Llama, tokens: ChatTokens, cases: int, seed: int) -> dict[str, float]:
    """How often the model says so when it is asked for something that it was never told, in short chats."""
    honest = 0
    for index in range(cases):
        rng = Random(f"untold {seed} {index}")
        maker = FactMaker(held_out_name)
        asked = _common_fact(rng, maker, held_out_name)
        others = {fact.key: fact for fact in (maker.fact(rng) for _ in range(rng.randrange(4)))}
        others.pop(asked.key, None)
        messages = system_message(rng)
        for other in others.values():
            messages += small_talk(rng)
            reply = other.acknowledge(rng, [other])
            messages += [Message("user", other.tell(rng)), Message("assistant", reply)]
        said, answer = asked.without_value().ask(rng)
        messages.append(Message("user", said))
        honest += tokens.decode(model.generate(tokens.prompt(messages), tokens.end)) == answer
    return {"cases": cases, "greedy": round(100 * honest / max(1, cases), 1)}


def share(results: Sequence[Result], name: str) -> float:
    """The share of ``results`` whose field ``name`` is true, in per cent with one digit."""
    return round(100 * sum(bool(getattr(result, name)) for result in results) / max(1, len(results)), 1)


def row(distance: int, results: Sequence[Result]) -> dict[str, Any]:
    """The figures of one distance."""
    return {
        "distance": distance,
        "cases": len(results),
        "mean_distance": round(sum(result.distance for result in results) / max(1, len(results))),
        "teacher_forced": share(results, "forced"),
        "greedy": share(results, "greedy"),
        "whole_answer": share(results, "exact"),
        "ended": share(results, "ended"),
    }


def groups(results: Sequence[Result]) -> dict[str, dict[str, float]]:
    """The greedy figure over all distances for kinds of cases."""
    kinds = {
        "with system prompt": [result for result in results if result.system],
        "without system prompt": [result for result in results if not result.system],
        "names of 3 or 4 letters": [result for result in results if len(result.name) <= 4],
        "names of 9 letters or more": [result for result in results if len(result.name) >= 9],
        "names that say a syllable twice": [
            result for result in results if re.search(r"^(\w\w+)\1", result.name.lower())
        ],
    }
    return {name: {"cases": len(those), "greedy": share(those, "greedy")} for name, those in kinds.items()}


def table(figures: dict[str, Any]) -> str:
    """The Markdown table of the model card."""
    lines = [
        "| Distance (tokens) | Cases | Teacher-forced | Greedy | Whole answer word for word |",
        "|---:|---:|---:|---:|---:|",
    ]
    for each in figures["rows"]:
        lines.append(
            f"| {each['distance']} | {each['cases']} | {each['teacher_forced']:.1f} % | "
            f"{each['greedy']:.1f} % | {each['whole_answer']:.1f} % |"
        )
    lines += ["", "| Kind of case, all distances | Cases | Greedy |", "|---|---:|---:|"]
    lines += [
        f"| {name} | {each['cases']} | {each['greedy']:.1f} % |" for name, each in figures["groups"].items()
    ]
    return "\n".join(lines)


def draw(figures: dict[str, Any], path: Path) -> None:
    """Draws the curve. matplotlib is needed for this only."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = figures["rows"]
    along = [each["distance"] for each in rows]
    picture, axes = pyplot.subplots(figsize=(8, 4.5), dpi=110)
    axes.plot(
        along, [each["teacher_forced"] for each in rows], "o--", color="#8a8a8a", label="teacher-forced"
    )
    axes.plot(
        along,
        [each["greedy"] for each in rows],
        "o-",
        color="#1f5fa8",
        label="greedy, name exact, answer ended",
    )
    axes.plot(
        [0, 1024, 1024, 1800],
        [98, 98, 95, 95],
        ":",
        color="#b03030",
        label="target: 98 % to 1,024, 95 % to 1,800",
    )
    lowest = min(min(each["greedy"], each["teacher_forced"]) for each in rows)
    axes.set_ylim(min(88.0, lowest - 3), 100.6)
    axes.set_xlim(0, 1900)
    axes.set_xlabel("tokens from the last mention of the name to the answer")
    axes.set_ylabel("answers with the right name, %")
    axes.set_title(f"Recall of names never seen in training ({rows[0]['cases']} conversations per point)")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left")
    picture.tight_layout()
    picture.savefig(path)
    pyplot.close(picture)


def fill_card(card: Path, figures: dict[str, Any]) -> None:
    """Replaces the table between the two marks of the model card."""
    before, rest = card.read_text().split(TABLE_START)
    after = rest.split(TABLE_END)[1]
    card.write_text(f"{before}{TABLE_START}\n{table(figures)}\n{TABLE_END}{after}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--cases", type=int, default=200, help="conversations per distance")
    parser.add_argument("--distances", type=int, nargs="+", default=list(DISTANCES))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600.0, help="stop after this time, with fewer cases")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--picture", type=Path, help="draw the curve here (needs matplotlib)")
    parser.add_argument("--card", type=Path, help="put the table into this model card")
    parser.add_argument("--failures", type=int, default=0, help="print this many wrong answers per distance")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, tokens = load_model(arguments.model), ChatTokens.load(arguments.model)
    started = time.monotonic()
    rows, everything = [], []
    for position, distance in enumerate(arguments.distances):
        # Each distance gets its share of the time that is left.
        left = started + arguments.seconds - time.monotonic()
        until = time.monotonic() + left / (len(arguments.distances) - position)
        results = measure(model, tokens, distance, arguments.cases, arguments.seed, until)
        rows.append(row(distance, results))
        everything += results
        print(json.dumps(rows[-1]), flush=True)
        for result in [each for each in results if not each.greedy][: arguments.failures]:
            print(f"   wanted {result.wanted!r} said {result.said!r}")
    apart = {}
    for kind in (CAPITALS, LOWER_CASE, MADE_UP, UNNAMED):
        until = time.monotonic() + 60
        results = measure(model, tokens, 512, arguments.cases, arguments.seed, until, kind)
        apart[f"{kind}, 512 tokens (not in the curve)"] = {
            "cases": len(results),
            "greedy": share(results, "greedy"),
        }
    figures = {
        "seed": arguments.seed,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "shape": asdict(model.shape),
        "rows": rows,
        "groups": {
            **groups(everything),
            **apart,
            "asked for what was never told, and says so": measure_untold(
                model, tokens, arguments.cases, arguments.seed
            ),
        },
    }
    print(json.dumps(figures["groups"], indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    if arguments.picture:
        draw(figures, arguments.picture)
    if arguments.card:
        fill_card(arguments.card, figures)


if __name__ == "__main__":
    main()
