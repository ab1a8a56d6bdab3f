"""Does throughput hold over time when debts are settled (Infinite-LLM, section 6.4 and figure 10)? Simulated.

Four instances serve requests of mixed lengths; a request stays where it was sent, and its KV grows over its
neighbours when its own memory is full. The decisions are the ledger's own classes: candidates, the debt graph
and what to settle next. What is modelled is time: an iteration streams the weights and the KV that the
instance holds, its own sequences' and others', and costs a message and a merge for each creditor that it
asks; an iteration is as slow as the slowest creditor in it. Bringing blocks home takes the link's time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from benchmarks.report import Report
from kvcommons.pb import common_pb2
from kvcommons.pb import ledger_pb2 as pb
from services.ledger.candidates import Candidates
from services.ledger.settlement_plan import Swap, plan

MODEL = b"model"
STEP_S = 0.5  # of simulated time
SPARE = 0.1  # of one instance's memory: kept for those that run to grow
# Whether who borrows lends last, blocks come home where there is room, and circles are settled.
MODES = {
    "no settlement": (False, False, False),
    "circles": (False, False, True),  # DGFM, as in the paper: whoever has room lends
    "circles and home": (True, True, True),  # as here
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Of one instance: LLaMA2-13B on two A100, as the paper's."""

    blocks: int = 900  # of memory for KV
    block_tokens: int = 64
    block_bytes: int = 64 * 819_200  # K and V of 40 layers, 5,120 wide, two bytes
    weights_s: float = 0.011  # to stream the weights once
    kv_bytes_s: float = 2.4e12  # reading KV
    link_bytes_s: float = 2.0e10  # between instances
    call_s: float = 0.004  # an iteration's messages to one creditor, all layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    instances: int = 4
    requests_per_minute: float = 60.0
    long_share: float = 0.12
    short_tokens: tuple[int, int] = (500, 6_000)
    long_tokens: tuple[int, int] = (15_000, 50_000)
    answer_tokens: tuple[int, int] = (1_000, 10_000)


@dataclass(slots=True, eq=False)
class Served:
    tokens: float
    left: float  # tokens to generate
    local: int = 0
    remote: dict[int, int] = field(default_factory=dict)  # creditor to blocks

    @property
    def blocks(self) -> int:
        return self.local + sum(self.remote.values())


@dataclass(slots=True)
class Instance:
    free: int
    running: list[Served] = field(default_factory=list)
    link_busy_until: float = 0.0

    def owed(self) -> dict[int, int]:
        owed: dict[int, int] = {}
        for sequence in self.running:
            for creditor, blocks in sequence.remote.items():
                owed[creditor] = owed.get(creditor, 0) + blocks
        return {creditor: blocks for creditor, blocks in owed.items() if blocks}


class Commons:
    """Some instances over time."""

    def __init__(self, hardware: Hardware, load: Load, *, mode: str, threshold: int, seed: int) -> None:
        self.hardware = hardware
        self.load = load
        self.lends_last, self.comes_home, self.circles = MODES[mode]
        self.threshold = threshold
        self.dice = random.Random(seed)
        self.candidates = Candidates(random.Random(seed))
        self.instances = [Instance(free=hardware.blocks) for _ in range(load.instances)]
        self.queue: list[Served] = []
        self.now = 0.0
        self.next_request = 0.0
        self.tokens = 0.0
        self.settled = 0

    def step(self) -> None:
        while self.next_request <= self.now:
            self._arrive()
            self.next_request += self.dice.expovariate(self.load.requests_per_minute / 60.0)
        self._admit()
        times = self.iteration_times()
        for number, instance in enumerate(self.instances):
            made = STEP_S / times[number]
            for sequence in list(instance.running):
                if sequence.blocks:  # not preempted meanwhile
                    self._generate(number, sequence, min(made, sequence.left))
        if self.comes_home:
            self._come_home()
        if self.circles:
            self._settle()
        self.now += STEP_S

    def remote_share(self) -> float:
        sequences = [one for instance in self.instances for one in instance.running]
        return sum(sum(one.remote.values()) for one in sequences) / max(
            1, sum(one.blocks for one in sequences)
        )

    def iteration_times(self) -> list[float]:
        """Seconds of an iteration, by instance: its weights, what it reads for its own and for others, and
        the slowest of the creditors that it waits for."""
        hardware = self.hardware
        owed = [instance.owed() for instance in self.instances]
        lent = [sum(debts.get(number, 0) for debts in owed) for number in range(len(owed))]
        read = hardware.block_bytes / hardware.kv_bytes_s
        # A creditor computes a debtor's partials between its own slices: both wait for its whole iteration.
        alone = [
            hardware.weights_s + read * (sum(one.local for one in instance.running) + lent[number])
            for number, instance in enumerate(self.instances)
        ]
        return [
            max(alone[number], max((alone[creditor] for creditor in owed[number]), default=0.0))
            + hardware.call_s * len(owed[number])
            for number in range(len(owed))
        ]

    def _arrive(self) -> None:
        dice, load = self.dice, self.load
        low, high = load.long_tokens if dice.random() < load.long_share else load.short_tokens
        tokens = low * (high / low) ** dice.random()
        self.queue.append(Served(tokens, float(dice.randint(*load.answer_tokens))))

    def _admit(self) -> None:
        """First come, first served, to the instance that has most free, as the router does."""
        while self.queue:
            sequence = self.queue[0]
            blocks = int(sequence.tokens) // self.hardware.block_tokens + 1
            spare = sum(one.free for one in self.instances) - blocks
            number = max(range(len(self.instances)), key=lambda one: self.instances[one].free)
            if spare < self.hardware.blocks * SPARE or not self._made_free(number, sequence, blocks):
                return
            self.instances[number].running.append(self.queue.pop(0))

    def _made_free(self, number: int, sequence: Served, blocks: int) -> bool:
        """Here, then with creditors that the ledger names; all or nothing."""
        instance = self.instances[number]
        local = min(blocks, instance.free)
        lent: dict[int, int] = {}
        missing = blocks - local
        while missing:
            request = pb.CandidatesRequest(debtor=str(number), host=str(number), model=MODEL, blocks=missing)
            self.candidates.follow(self._heartbeats(lent))
            found = self.candidates.choose(request, self.now)
            if not found:
                return False
            creditor = int(found[0].id)
            count = min(missing, found[0].load.lendable_blocks)
            lent[creditor] = lent.get(creditor, 0) + count
            missing -= count
        instance.free -= local
        sequence.local += local
        for creditor, count in lent.items():
            self.instances[creditor].free -= count
            sequence.remote[creditor] = sequence.remote.get(creditor, 0) + count
        return True

    def _heartbeats(self, lent: Mapping[int, int]) -> dict[str, pb.Instance]:
        return {
            str(number): pb.Instance(
                id=str(number),
                service="decode",
                host=str(number),
                model=common_pb2.ModelInfo(fingerprint=MODEL),
                load=pb.Load(
                    lendable_blocks=instance.free - lent.get(number, 0),
                    debts={str(creditor): blocks for creditor, blocks in instance.owed().items()}
                    if self.lends_last
                    else {},
                    ready=True,
                ),
            )
            for number, instance in enumerate(self.instances)
        }

    def _generate(self, number: int, sequence: Served, made: float) -> None:
        needed = int(sequence.tokens + made) // self.hardware.block_tokens + 1 - sequence.blocks
        if needed > 0 and not self._made_free(number, sequence, needed):
            self._free(number, self.instances[number].running[-1])  # the youngest is preempted
            return
        sequence.tokens += made
        sequence.left -= made
        self.tokens += made
        if sequence.left <= 0:
            self._free(number, sequence)

    def _free(self, number: int, sequence: Served) -> None:
        """It has ended; if not, it is the next to be admitted, with the KV that a store has of it."""
        instance = self.instances[number]
        instance.running.remove(sequence)
        instance.free += sequence.local
        for creditor, blocks in sequence.remote.items():
            self.instances[creditor].free += blocks
        sequence.local, sequence.remote = 0, {}
        if sequence.left > 0:
            self.queue.insert(0, sequence)

    def _come_home(self) -> None:
        """Where there is room, as each debtor decides for itself."""
        for debtor, instance in enumerate(self.instances):
            capacity = instance.free - int(self.hardware.blocks * SPARE)
            owed = instance.owed()
            if capacity > 0 and owed and instance.link_busy_until <= self.now:
                creditor = max(owed, key=lambda one: owed[one])
                self._bring_home(debtor, creditor, min(capacity, owed[creditor]))

    def _settle(self) -> None:
        """Circles, as the ledger's leader plans them."""
        numbers = range(len(self.instances))
        debts = {
            str(number): {str(creditor): blocks for creditor, blocks in self.instances[number].owed().items()}
            for number in numbers
        }
        busy = {str(number) for number in numbers if self.instances[number].link_busy_until > self.now}
        for one in plan(debts, {}, threshold=self.threshold, busy=busy):
            # Somebody needs a block to begin with.
            if isinstance(one, Swap) and any(self.instances[int(leg[0])].free for leg in one.legs):
                for debtor, creditor, blocks in one.legs:
                    self._bring_home(int(debtor), int(creditor), blocks)

    def _bring_home(self, debtor: int, creditor: int, blocks: int) -> None:
        """In a circle what one clears is what the one before it comes home to, so that in the end as much is
        free as before."""
        hardware = self.hardware
        here, there = self.instances[debtor], self.instances[creditor]
        left = blocks
        for sequence in here.running:
            moved = min(left, sequence.remote.get(creditor, 0))
            if moved:
                sequence.remote[creditor] -= moved
                if not sequence.remote[creditor]:
                    del sequence.remote[creditor]
                sequence.local += moved
                left -= moved
        here.free -= blocks - left
        there.free += blocks - left
        self.settled += blocks - left
        here.link_busy_until = self.now + (blocks - left) * hardware.block_bytes / hardware.link_bytes_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Of one mode: by window of time, tokens a second and the share of blocks that lie elsewhere."""

    tokens_s: list[float]
    remote: list[float]
    settled_blocks: int


def simulate(mode: str, load: Load, *, minutes: float, windows: int, threshold: int, seed: int) -> Run:
    commons = Commons(Hardware(), load, mode=mode, threshold=threshold, seed=seed)
    steps = int(minutes * 60 / STEP_S / windows)
    tokens_s, remote = [], []
    for _ in range(windows):
        before, shares = commons.tokens, 0.0
        for _ in range(steps):
            commons.step()
            shares += commons.remote_share()
        tokens_s.append((commons.tokens - before) / (steps * STEP_S))
        remote.append(shares / steps)
    return Run(tokens_s=tokens_s, remote=remote, settled_blocks=commons.settled)


def compare(
    load: Load,
    *,
    minutes: float,
    windows: int,
    threshold: int,
    seeds: Sequence[int],
    progress: Callable[[str], None],
) -> Report:
    """All modes on the same requests, means over the seeds; a row a window of time."""
    runs: dict[str, list[Run]] = {name: [] for name in MODES}
    for seed in seeds:
        progress(f"{minutes:.0f} minutes of seed {seed}")
        for name in MODES:
            runs[name].append(
                simulate(name, load, minutes=minutes, windows=windows, threshold=threshold, seed=seed)
            )
    width = minutes / windows
    rows: list[dict[str, str | int | float]] = [
        {"minutes": f"{window * width:.0f}-{(window + 1) * width:.0f}"} for window in range(windows)
    ]
    for name, of_mode in runs.items():
        for window, row in enumerate(rows):
            row[f"tokens/s, {name}"] = fmean(run.tokens_s[window] for run in of_mode)
            row[f"remote %, {name}"] = 100 * fmean(run.remote[window] for run in of_mode)
    ratios: dict[str, float] = {}
    for name in MODES:
        values = [float(row[f"tokens/s, {name}"]) for row in rows]
        ratios[f"last third over first, {name}"] = thirds(values)
    bare = next(iter(MODES))
    for name in [*MODES][1:]:
        ratios[f"{name} over {bare}"] = fmean(
            fmean(one.tokens_s) / fmean(other.tokens_s)
            for one, other in zip(runs[name], runs[bare], strict=True)
        )
        ratios[f"blocks settled, {name}"] = fmean(run.settled_blocks for run in runs[name])
    return Report(
        title=f"{load.instances} instances, {minutes:.0f} simulated minutes, mixed lengths",
        ratios=ratios,
        rows=rows,
    )


def thirds(values: Sequence[float]) -> float:
    """The last third of a run over its first, without the window that fills the memory."""
    third = max(1, len(values) // 3)
    return fmean(values[-third:]) / fmean(values[1 : third + 1])
