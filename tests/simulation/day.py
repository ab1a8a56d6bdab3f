"""A day of a kvstore: one long conversation among many short ones, on the simulated machine."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from hashlib import shake_128

from kvcommons.errors import SessionNotFound
from services.kvstore.policies.floors import TenantFloors
from services.kvstore.policies.hit_density import HitDensity
from services.kvstore.session import TurnBegin, TurnCommit
from services.kvstore.sessions import Sessions
from services.kvstore.writer import Round
from tests.simulation.machine import Rocks, require
from tests.simulation.sequences import SMALL
from tests.simulation.store_invariants import blocks_of, check, on_disk
from tests.simulation.store_schedule import StoreSchedule

DAY_S = 86_400.0
_LIFE = "life"
_LIFE_TTL_S = 6 * 3600
_SHORT_TTL_S = 1800
_BLOCK_TTL_S = 2 * 3600.0
_SWEEP_S = 600.0
_LOOK_AHEAD_S = 240.0
_TURNS_MAX = 8


class Day(StoreSchedule):
    """`run` lives it through; it raises Violation. Nothing fails: it is to show that nothing piles up."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.machine.heal()
        self._policy, self._buffer, self._ttl_s = "scheduler-aware", 0.1, _BLOCK_TTL_S
        self._dram_pages, self._disk_pages = 60, 125
        self._begin_life()
        self._open()
        self.session_rocks = Rocks(self.machine)
        self.sessions = Sessions(
            self.session_rocks,
            default_ttl_s=_SHORT_TTL_S,
            clock=self.machine,
            unnamed=self._unnamed,
        )
        self.sessions.create("t", _LIFE, _LIFE_TTL_S)
        self._began_s = self.machine.time_s
        self._queue: list[tuple[float, int, str]] = []  # (seconds, number, session): turns to come
        self._turns = 0
        self._swept_s = 0.0
        self.life_turns = self.life_hits = 0
        self.most_blocks = 0

    def run(self) -> None:
        end_s = self._began_s + DAY_S
        self._push(60.0, _LIFE)
        self._push(0.0, "short 0")
        restarted = False
        while self._queue[0][0] < end_s:
            self._look_ahead()
            at_s, number, name = heapq.heappop(self._queue)
            self._until(at_s)
            if not restarted and at_s > self._began_s + DAY_S / 2:
                restarted = True
                self._rest()
                self._reopen(on_disk(self.store))
            self._take(name, number)
            check(self)
            self.most_blocks = max(self.most_blocks, sum(1 for _ in blocks_of(self.store)))
        self._queue.clear()
        self._until(self.machine.time_s + 2 * _LIFE_TTL_S)
        self._check_nothing_is_left()

    def _unnamed(self, model: bytes, ids: Sequence[bytes]) -> None:
        self.store.forget(model, ids)

    def _push(self, in_s: float, name: str) -> None:
        self._turns += 1
        heapq.heappush(self._queue, (self.machine.time_s + in_s, self._turns, name))

    def _look_ahead(self) -> None:
        """The router tells which turns wait, and what they want is fetched."""
        now_s = self.machine.time_s
        uses = []
        for at_s, _, name in sorted(self._queue):
            ids = self._ids(name)
            if ids and at_s < now_s + _LOOK_AHEAD_S:
                uses.append((SMALL.model, ids, at_s - now_s))
        self.store.prefetcher.hint("router", uses, 30.0)
        while self.store.prefetcher.step():
            self._drain()

    def _until(self, at_s: float) -> None:
        """Time passes; the store's threads do what they do now and then."""
        while self.machine.time_s < at_s:
            self.machine.time_s = min(at_s, self.machine.time_s + 300.0)
            if self.machine.time_s >= self._swept_s + _SWEEP_S:
                self._swept_s = self.machine.time_s
                self.sessions.sweep()
            self._rest()

    def _rest(self) -> None:
        while self.store.write_round() is not Round.IDLE:
            pass
        self.store.prefetcher.step()

    def _ids(self, name: str) -> list[bytes]:
        try:
            return list(self.sessions.get("t", name).block_ids)
        except SessionNotFound:
            return []

    def _take(self, name: str, number: int) -> None:
        """One turn: reads its history, computes what is not there, and is committed with what it adds."""
        wanted = TurnBegin(turn_id=f"{number}", owner="o", lease_ms=60_000)
        begun = self.sessions.begin("t", name, wanted)
        record, lease = begun.record, begun.lease
        history = list(record.block_ids)
        read = self._read(history)
        if name == _LIFE:
            self.life_turns += 1
            self.life_hits += read == len(history)
        count = int(self.machine.strikes(0.3)) if name == _LIFE else self.dice.randint(0, 4)
        new = [_block(name, len(history) + n) for n in range(count)]
        if read < len(history) + len(new):
            self._send(SMALL, [*history, *new][read:])
        turn = TurnCommit(
            turn_id=f"{number}",
            fencing=lease.fencing,
            expected_version=record.version,
            model=SMALL.model,
            model_name="m",
            new_tokens=[number],
            new_messages=[],
            kept_blocks=len(history),
            block_ids=new,
        )
        self.sessions.commit("t", name, turn)
        self._rest()
        if name == _LIFE:
            self._push(self.dice.expovariate(1 / 600.0), name)
            return
        if name.endswith(" 0") or self.dice.random() < 0.02:  # a prompt without a session
            self._send(SMALL, [_block(f"prompt {number}", n) for n in range(3)])
        if record.version < _TURNS_MAX and self.machine.strikes(0.75):
            self._push(self.dice.expovariate(1 / 200.0), name)
        if record.version == 0:
            self._push(self.dice.expovariate(1 / 300.0), f"short {number}")

    def _read(self, ids: list[bytes]) -> int:
        """How many of the leading blocks came; that their bytes are right is checked on the way."""
        if not ids:
            return 0
        run = self.store.open_run(SMALL.model, ids)
        self.runs.append((run, SMALL, ids))
        self._drain()
        for _ in range(SMALL.layers):
            self._read_run()
        self._close_run()
        return len(run)

    def _check_nothing_is_left(self) -> None:
        check(self)
        catalog = self.store._catalog
        stats = self.store.stats()
        require(self.sessions.count == 0, "a session outlived its time")
        require(not stats.dram_blocks and not stats.disk_blocks, "a block outlived its time")
        require(not catalog.dram.occupied and not catalog.disk.occupied, "a slot was lost")
        require(not stats.staging and not stats.pending_writes, "something was left behind")
        require(not any(f == "blocks" for f, _ in self.rocks.current), "the index names a block")
        left = {family for family, _ in self.session_rocks.current} - {"meta"}
        require(not left & {"records", "heads", "uses", "leases"}, f"rows were left in {left}")
        require(not any(catalog.evictor.hints.jobs._all()), "a job is expected that nobody hints")
        require(not len(catalog.ages), "the time to live counts blocks that are gone")
        for space in catalog._spaces.values():
            for policy in (space.dram_policy, space.disk_policy):
                assert isinstance(policy, TenantFloors)
                assert isinstance(policy.policy, HitDensity)
                require(not policy._tenants and not policy._weights, "a tenant's floor counts a block")
                density = policy.policy
                require(not density._held and not any(density._cohorts.values()), "a policy holds a block")


def _block(name: str, number: int) -> bytes:
    return shake_128(f"{name} {number}".encode()).digest(32)
