"""By how much what iterations were expected to take differs from what they took, as /metrics has it: of a
stack that computes short and long prompts beside answers for a while.

    python -m tests.system.prediction_error --seconds 60 --folder FOLDER [--colocated] [--model 34m]

The metric is a mean over the last iterations, some dozens: it is read each second. What counts is the mean of
the second half, while the load goes on.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from kvcommons.errors import Overloaded
from kvcommons.model.synthetic import random_config, write_random_folder
from tests.system.scrape import scrape
from tests.system.stack import Stack

METRIC = "kvcommons_iteration_prediction_error_ratio"
CLIENTS = 4
READ_EVERY_S = 1.0
TURNS = 4  # of a session
SHORT, LONG = (3, 60), (100, 300)  # sentences of a message, of some 22 tokens each
ANSWER = (8, 96)  # tokens
LONG_SHARE = 0.2  # of all messages
COLOURS = ("blue", "green", "red", "white")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Ratios, 0 to 1."""

    mean: float  # of the second half of the time
    last: float
    read: list[float]  # one after another


class Clients:
    """Each holds one conversation after another until they are to stop. Short turns in sessions, and long
    prompts without one."""

    def __init__(self, stack: Stack, seed: int) -> None:
        self._stack = stack
        self._seed = seed
        self._over = threading.Event()

    def stop(self) -> None:
        self._over.set()

    def converse(self, number: int) -> int:
        """How many turns one of them had."""
        draw, turns = random.Random(f"{self._seed} {number}"), 0
        while not self._over.is_set():
            is_long = draw.random() < LONG_SHARE
            session = None if is_long else f"client-{number}-{turns // TURNS}"
            length = draw.randint(*(LONG if is_long else SHORT))
            message = " ".join(
                f"My friend number {draw.randrange(10_000)} likes {draw.choice(COLOURS)}."
                for _ in range(length)
            )
            try:
                self._stack.client.say(message, session, max_tokens=draw.randint(*ANSWER), ignore_eos=True)
            except Overloaded:
                self._over.wait(READ_EVERY_S)
                continue
            turns += 1
        return turns


def run(
    folder: Path, seconds: float, *, model: str = "7m", colocated: bool = False, seed: int = 1
) -> dict[str, Figures]:
    """By service: those that compute."""
    write_random_folder(folder / "model", random_config(model))
    services = ["decode"] if colocated else ["prefill", "decode"]
    stack = Stack(folder / "stack", model=str(folder / "model"), attention_pool=0, colocated=colocated)
    read: dict[str, list[float]] = {service: [] for service in services}
    with stack, ThreadPoolExecutor(CLIENTS) as pool:
        clients = Clients(stack, seed)
        conversing = [pool.submit(clients.converse, number) for number in range(CLIENTS)]
        try:
            until_s = time.monotonic() + seconds
            while time.monotonic() < until_s:
                time.sleep(READ_EVERY_S)
                for service in services:
                    read[service].append(scrape(stack, service).value(METRIC))
        finally:
            clients.stop()
        turns = [one.result() for one in conversing]
        assert all(turns), "a client had no turn"
        print(json.dumps({"turns": sum(turns)}), file=sys.stderr)
        stack.assert_no_block_is_held()
    stack.assert_gone()
    return {
        service: Figures(mean=fmean(found[len(found) // 2 :]), last=found[-1], read=found)
        for service, found in read.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--model", default="7m", help="a random one of a known size")
    parser.add_argument("--colocated", action="store_true", help="prompts are computed beside answers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, required=True, help="for data and logs")
    options = parser.parse_args(arguments)
    figures = run(
        options.folder, options.seconds, model=options.model, colocated=options.colocated, seed=options.seed
    )
    print(json.dumps({service: asdict(found) for service, found in figures.items()}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
