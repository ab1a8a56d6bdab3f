"""Several kvstores on one database under load, and a hand that kills them and it.

`python -m tests.fault.records_chaos --minutes 10 [--seed N] [--replica]` does so for longer, and says what it
saw. With `--replica` the database has a synchronous one, which is promoted instead of a restart.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from kvcommons.errors import Conflict, KVCommonsError, SessionNotFound, TurnInProgress
from tests.contract.kvstores import Kvstores
from tests.contract.postgres_server import PostgresPair, PostgresServer
from tests.fault.histories import Commit, Read, violations
from tests.machine import scaled

NAMES = ("a", "b", "c")
SESSIONS = 6
WORKERS = 8
LEASE_MS = scaled(3_000)  # of a turn that nobody heard of; the session waits for its end
PROGRESS_S = scaled(60.0)


@dataclass
class History:
    """Of one session."""

    commits: list[Commit] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    refused: set[int] = field(default_factory=set)  # tokens of turns that were said not to be there


@dataclass
class Chaos:
    """`run` it until `until_s`, or for so many kills, then `check` it."""

    seed: int
    kvstores: Kvstores
    database: PostgresServer | PostgresPair
    histories: dict[str, History] = field(default_factory=dict)
    kills: Counter[str] = field(default_factory=Counter)
    acknowledged: int = 0
    slowest_s: float = 0.0  # of acknowledged commits

    def __post_init__(self) -> None:
        self._tokens = itertools.count(1)
        self._over = False
        self.histories = {f"s{number}": History() for number in range(SESSIONS)}

    async def run(self, *, kills: int = sys.maxsize, seconds: float = float("inf")) -> None:
        until_s = time.monotonic() + seconds
        dice, deck = random.Random(self.seed), list[str]()
        async with asyncio.TaskGroup() as tasks:
            for number in range(WORKERS):
                tasks.create_task(self._work(random.Random(f"{self.seed} {number}")))
            while sum(self.kills.values()) < kills and time.monotonic() < until_s:
                await self._progress()
                await asyncio.sleep(dice.uniform(0.0, 0.5))
                deck = deck or dice.sample((*NAMES, "database"), len(NAMES) + 1)
                victim = deck.pop()
                self.kills["database" if victim == "database" else "kvstore"] += 1
                if victim == "database":
                    self.database.kill()
                    await asyncio.sleep(dice.uniform(0.0, 0.5))
                    await asyncio.to_thread(self.database.start)
                else:
                    self.kvstores.processes[victim].kill()
                    self.kvstores.start(victim)
            await self._progress()
            self._over = True

    async def check(self) -> list[str]:
        """What must never be, once everybody is back."""
        await self.database.ready()
        await self.kvstores.serve(*NAMES)
        found = []
        for name, history in self.histories.items():
            last = await self._read(name)
            found += [f"{name}: {one}" for one in violations(history.commits, history.reads, last)]
            found += [f"{name}: {token} was refused" for token in history.refused & set(last)]
        return found

    async def _progress(self) -> None:
        """Until a turn is acknowledged that had not been."""
        before = self.acknowledged
        async with asyncio.timeout(PROGRESS_S):
            while self.acknowledged == before:
                await asyncio.sleep(0.01)

    async def _work(self, dice: random.Random) -> None:
        while not self._over:
            name = dice.choice(list(self.histories))
            if dice.random() < 0.3:
                await self._look(name)
            else:
                await self._turn(name)

    async def _look(self, name: str) -> None:
        began_s = time.monotonic()
        try:
            tokens = await self._read(name)
        except KVCommonsError:
            return
        self.histories[name].reads.append(Read(tokens=tokens, began_s=began_s, ended_s=time.monotonic()))

    async def _read(self, name: str) -> list[int]:
        try:
            return await self.kvstores.tokens(name)
        except SessionNotFound:
            return []

    async def _turn(self, name: str) -> None:
        history, token, version = self.histories[name], next(self._tokens), None
        try:
            begun = await self.kvstores.begin(name, LEASE_MS)
        except TurnInProgress:
            await asyncio.sleep(0.01)
            return
        except KVCommonsError:
            return
        began_s = time.monotonic()
        history.reads.append(
            Read(tokens=list(begun[1].record.tokens), began_s=began_s, ended_s=began_s)
        )  # nobody else may commit until this turn has ended, or its lease
        try:
            version = await self.kvstores.commit(self.kvstores.committing(begun, [token]))
        except Conflict:
            history.refused.add(token)
            return
        except KVCommonsError:
            pass  # it may be there or not
        else:
            self.acknowledged += 1
            self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
        history.commits.append(
            Commit(token=token, began_s=began_s, ended_s=time.monotonic(), version=version)
        )


async def opened(folder: Path, seed: int, database: PostgresServer | PostgresPair) -> Chaos:
    kvstores = Kvstores(folder, database.url())
    kvstores.directory.start()
    for name in NAMES:
        kvstores.start(name)
    await kvstores.serve(*NAMES)
    return Chaos(seed=seed, kvstores=kvstores, database=database)


async def _main(minutes: float, seed: int, *, replica: bool) -> int:
    folder = Path(tempfile.mkdtemp(prefix="kvs-"))
    database = PostgresPair() if replica else PostgresServer()
    database.start()
    await database.ready()
    chaos = await opened(folder, seed, database)
    try:
        await chaos.run(seconds=minutes * 60)
        found = await chaos.check()
    finally:
        await chaos.kvstores.close()
        database.remove()
        shutil.rmtree(folder)
    reads = sum(len(history.reads) for history in chaos.histories.values())
    print(
        f"seed {seed}: {chaos.acknowledged} turns acknowledged, {reads} reads, kills {dict(chaos.kills)}, "
        f"slowest commit {chaos.slowest_s:.1f} s, {len(found)} violations"
    )
    for one in found[:20]:
        print(one)
    return 1 if found else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.fault.records_chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--replica", action="store_true")
    arguments = parser.parse_args()
    logging.disable(logging.ERROR)
    sys.exit(asyncio.run(_main(arguments.minutes, arguments.seed, replica=arguments.replica)))
