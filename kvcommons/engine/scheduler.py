"""What the next iteration computes, and who gives way when memory is short: a pure class.

Sequences are known by number, smaller ones being older. Prompts are admitted to memory first come, first
served, and alternate at chunk borders. For each token of the oldest one a token of others may be computed,
the fewest left first, and those that are done with it may have a chunk more on credit. So a short prompt
waits for the chunk under way alone, however long the prompts before it are, as long as short ones are less
than half of the work; and others are never ahead of the oldest by more than a chunk: nobody starves. Of the
sequences that generate the oldest run, at most `max_batch` at once.

Prompts in the background (parts of documents) are admitted behind all others and computed while there are
none, in the order in which they came; beside others they have one iteration of `BACKGROUND_EVERY`, so that
they come to an end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate

from kvcommons.engine.sequence import Sequence
from kvcommons.errors import Overloaded
from kvcommons.placement.base import Next

BACKGROUND_EVERY = 8
_LEAST_SHARE = 32  # of what an iteration may compute, as which one of fewer tokens counts beside those


class SequenceState(Enum):
    """Of a sequence."""

    WAITING = "waiting"  # its prompt is to be computed here, and waits for memory
    COMPUTING = "computing"  # its prompt is computed here, chunk by chunk
    RESERVED = "reserved"  # it has its blocks; another instance computes its prompt
    RUNNING = "running"  # it generates: a token each iteration
    BORROWING = "borrowing"  # it generates, and asks other holders for room: it sits out meanwhile


@dataclass(slots=True, kw_only=True)
class _Prompt:
    tokens_left: int
    deadline_s: float
    background: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What happens to sequences that generate: preempt first, then grow, then run the batch. Borrowers are
    asked for apart."""

    batch: list[int] = field(default_factory=list)
    grow: list[int] = field(default_factory=list)  # of the batch: one more local block each
    borrow: list[int] = field(default_factory=list)
    preempt: list[int] = field(default_factory=list)


class Scheduler:
    """Continuous batching. `max_queue` bounds the prompts that wait for memory, `max_prompts` those that are
    computed, `max_batch` the sequences that generate in one iteration."""

    def __init__(self, *, max_batch: int = 0, max_queue: int = 0, max_prompts: int = 0) -> None:
        self._max_batch = max_batch
        self._max_queue = max_queue
        self._max_prompts = max_prompts
        self._states: dict[int, SequenceState] = {}
        self._prompts: dict[int, _Prompt] = {}  # in the order in which they came
        self._oldest: int | None = None  # of the prompts that could be computed
        self._others_may = 0  # so many tokens of others before the oldest one goes on
        self._chosen: list[int] = []  # for the last iteration
        self._unable: set[int] = set()  # those that could not use their turn since any prompt got further
        self._passed_over = 0  # iterations of others while background prompts could have been computed

    @property
    def running(self) -> int:
        """Sequences that generate, as many as fit the batch."""
        return min(self._generating(), self._max_batch)

    @property
    def queued(self) -> int:
        """Sequences that generate, beyond the batch."""
        return max(0, self._generating() - self._max_batch)

    @property
    def computing(self) -> int:
        """Prompts that hold memory."""
        return self._count(SequenceState.COMPUTING)

    @property
    def waiting(self) -> int:
        """Prompts that wait for memory."""
        return self._count(SequenceState.WAITING)

    @property
    def any_running(self) -> bool:
        """Whether any sequence would generate, had it room."""
        return self._count(SequenceState.RUNNING) > 0

    # Prompts that are computed here.

    def submit(self, key: int, *, tokens: int, deadline_s: float, background: bool = False) -> None:
        """Queues a prompt of `tokens` that is worth nothing after `deadline_s`. Raises Overloaded."""
        waiting = self.waiting
        if waiting >= self._max_queue:
            raise Overloaded(
                f"{waiting} prompts wait for this instance, its most: retry later", retry_after_ms=1000
            )
        self._states[key] = SequenceState.WAITING
        self._prompts[key] = _Prompt(tokens_left=tokens, deadline_s=deadline_s, background=background)

    def admissible(self) -> list[int]:
        """Waiting prompts in the order in which memory is to be offered to them; empty while enough are
        computed."""
        computing = self._in(SequenceState.COMPUTING)
        if len(self._split(computing)[0]) >= self._max_prompts:
            return []
        urgent, background = self._split(self._in(SequenceState.WAITING))
        return [*urgent, *(background if len(computing) < self._max_prompts else ())]

    def admit(self, key: int, *, tokens_left: int) -> None:
        self._states[key] = SequenceState.COMPUTING
        self._prompts[key].tokens_left = tokens_left

    def progress(self, key: int, *, tokens_left: int) -> None:
        """A chunk of the prompt is done, or it was set back."""
        prompt = self._prompts[key]
        if not prompt.background:
            computed = max(prompt.tokens_left - tokens_left, 0)
            self._others_may += computed if key == self._oldest else -computed
            self._chosen = []
            self._unable.clear()
        prompt.tokens_left = tokens_left

    def expired(self, now_s: float) -> list[int]:
        """Prompts whose deadline has passed."""
        return [key for key, prompt in self._prompts.items() if prompt.deadline_s <= now_s]

    def spans(
        self, ready: Callable[[int], bool], tokens: int, is_short: Callable[[int], bool] = lambda key: True
    ) -> list[tuple[int, int]]:
        """Whose chunks are computed in the next iteration, of those that are `ready` (their history is there,
        if they wait for any), and how many tokens of each: `tokens` in all. What the oldest leaves on its
        turn goes to the others. On theirs it has no part: they would wait for its rows. Those that `is_short`
        says take little of an iteration, with all that they have left, wait for nobody's rows but those of
        such."""
        computing = self._in(SequenceState.COMPUTING)
        # Of those that have nothing left the end is awaited.
        able, background = self._split([key for key in computing if self._tokens_left(key) and ready(key)])
        # Whoever had no room is passed over: those have it who wait for their turn.
        self._unable.update(self._chosen)
        self._unable.intersection_update(able)
        if len(self._unable) == len(able):
            self._unable.clear()
        able = [key for key in able if key not in self._unable]
        if tokens < 1 or not (able or background):
            return []
        self._passed_over += bool(background)
        if not able or self._passed_over >= BACKGROUND_EVERY:
            self._passed_over = 0
            return self._shares(background, tokens)
        self._oldest, others = able[0], sorted(able[1:], key=self._tokens_left)
        self._others_may = min(self._others_may, tokens)
        first: list[int] = []
        credit = tokens + self._others_may  # by which they may be ahead of it
        short = list(filter(is_short, self._done_with(others, tokens)))
        if self._oldest in self._done_with(sorted(able, key=self._tokens_left), tokens):
            if is_short(self._oldest):
                first = [self._oldest, *short]
            else:
                first = self._done_with(short, credit)
        elif self._others_may > 0:
            first = short or others
        else:
            first = self._done_with(short, credit) or self._done_with(others, credit)
        shares = self._shares(first or [self._oldest, *others], tokens)
        self._chosen = [key for key, _ in shares]
        if first and self._oldest not in first:  # an iteration of few tokens takes its time, too
            self._others_may -= max(tokens // _LEAST_SHARE - sum(share for _, share in shares), 0)
        return shares

    def _shares(self, keys: list[int], tokens: int) -> list[tuple[int, int]]:
        """Of so many tokens in all, to the first ones what they have left."""
        chosen = []
        for key in keys:
            if share := min(self._tokens_left(key), tokens):
                chosen.append((key, share))
            tokens -= share
        return chosen

    def _split(self, keys: list[int]) -> tuple[list[int], list[int]]:
        """Prompts, and those in the background."""
        found: tuple[list[int], list[int]] = ([], [])
        for key in keys:
            found[self._prompts[key].background].append(key)
        return found

    def _done_with(self, shortest: list[int], tokens: int) -> list[int]:
        """The first of them that so many tokens are enough for."""
        used = accumulate(map(self._tokens_left, shortest))
        return [key for key, by_then in zip(shortest, used, strict=True) if by_then <= tokens]

    # Sequences that generate.

    def reserve(self, key: int) -> None:
        self._states[key] = SequenceState.RESERVED

    def start(self, key: int) -> None:
        """The prompt's KV is complete, wherever it was computed."""
        self._prompts.pop(key, None)
        self._states[key] = SequenceState.RUNNING

    def borrowed(self, key: int) -> None:
        """A borrower got its answer: it runs again. Others ended meanwhile, or have not begun."""
        if self._states.get(key) is SequenceState.BORROWING:
            self._states[key] = SequenceState.RUNNING

    def remove(self, key: int) -> None:
        """The sequence ended, wherever it was; unknown ones are ignored."""
        self._states.pop(key, None)
        self._prompts.pop(key, None)

    def plan(
        self,
        *,
        needy: frozenset[int],
        free_blocks: int,
        freed_by: Mapping[int, int],
        may_borrow: bool,
        away: frozenset[int] = frozenset(),
        may_preempt: bool = True,
    ) -> Plan:
        """Who generates in the next iteration.

        `needy` are the sequences whose blocks are all full, those `away` of them get their next one
        elsewhere whatever is free here; `free_blocks` is what can be allocated here, `freed_by` how many
        blocks would come free if a sequence ended. Oldest first: each needy one takes a free block; when none
        is left it borrows, if the policy allows (`may_borrow`); else the youngest sequence that holds blocks
        gives way, which may be the needy one itself. Not `may_preempt`: blocks of the last one that gave way
        are still coming free, and the needy sit out meanwhile.
        """
        batch, grow, borrow = [], [], []
        preempt: set[int] = set()
        for key in sorted(self._in(SequenceState.RUNNING))[: self._max_batch]:
            if key in preempt:
                continue
            if key in needy:
                while may_preempt and free_blocks < 1 and not may_borrow and key not in preempt:
                    victim = self._youngest(freed_by, preempt, at_least=key)
                    preempt.add(victim)
                    free_blocks += freed_by.get(victim, 0)
                if key in preempt or (free_blocks < 1 and not may_borrow):
                    continue
                if free_blocks < 1 or key in away:
                    borrow.append(key)
                    self._states[key] = SequenceState.BORROWING
                    continue
                free_blocks -= 1
                grow.append(key)
            batch.append(key)
        return Plan(
            batch=[key for key in batch if key not in preempt],
            grow=[key for key in grow if key not in preempt],
            borrow=borrow,
            preempt=sorted(preempt, reverse=True),
        )

    def victim_for(self, key: int, freed_by: Mapping[int, int], *, may_preempt: bool = True) -> int | None:
        """Who gives way to a borrower that nobody lends to: the youngest with blocks, maybe itself.

        Not `may_preempt`, as in `plan`: nobody, and the borrower asks again meanwhile."""
        return self._youngest(freed_by, set(), at_least=key) if may_preempt else None

    def _youngest(self, freed_by: Mapping[int, int], gone: set[int], *, at_least: int) -> int:
        """The youngest sequence, not older than `at_least`, whose end frees blocks; `at_least` where there is
        none."""
        able = [
            key for key in self._states if key > at_least and key not in gone and freed_by.get(key, 0) > 0
        ]
        return max(able, default=at_least)

    def _generating(self) -> int:
        return self._count(SequenceState.RUNNING) + self._count(SequenceState.BORROWING)

    def _count(self, state: SequenceState) -> int:
        return sum(one is state for one in self._states.values())

    def _in(self, state: SequenceState) -> list[int]:
        return [key for key, one in self._states.items() if one is state]

    def _tokens_left(self, key: int) -> int:
        return self._prompts[key].tokens_left


def freed_by(sequences: Mapping[int, Sequence]) -> dict[int, int]:
    """Blocks here that would come free if a sequence ended: those that it alone holds. One that waits for its
    prompt gives way, too: prefill is refused from then on, and finds what it computed at the next attempt."""
    holders = Counter(block for sequence in sequences.values() for block in sequence.local_blocks())
    return {
        key: sum(holders[block] == 1 for block in sequence.local_blocks())
        for key, sequence in sequences.items()
    }


def plan_for(
    scheduler: Scheduler,
    sequences: Mapping[int, Sequence],
    *,
    free_blocks: int,
    may_borrow: bool,
    may_preempt: bool,
) -> Plan:
    """The next iteration of these sequences, by the room that each of them has. One without any is a spread
    prompt, whose token is under way in other stages."""
    needy = frozenset(
        key
        for key, sequence in sequences.items()
        if sequence.runs and sequence.prompt_computed and sequence.full
    )
    short = len(needy) > free_blocks and not may_borrow
    return scheduler.plan(
        needy=needy,
        free_blocks=free_blocks,
        freed_by=freed_by(sequences) if short else {},
        may_borrow=may_borrow,
        away=frozenset(key for key in needy if sequences[key].next_block() in (Next.AWAY, Next.NEW_HOLDER)),
        may_preempt=may_preempt,
    )
