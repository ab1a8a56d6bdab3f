"""Carries a turn's actions out, over gRPC, and brings it what comes back, until it ends or its deadline
passes.

`Attempt` and timers emit events; `Turn` and `Choice`, which do no I/O, answer with actions; `_Run.carry_out`
does those:

| event | of | actions that follow |
| --- | --- | --- |
| (the turn begins) | | Start of each prompt's first choice |
| Waits | the capacity queue | none: it says what the client is told if its time runs out |
| Reserved | decode | Compute, unless decode computes the prompt itself |
| Borrowed | decode | none: the proof names who lent memory |
| Missing | decode | Compute of what it lacks, once prefill is done with an earlier one |
| PrefillStarted | prefill | none: from here on a failure is a strike |
| First | who computed the prompt | Delta; with a choice's first token Start of the prompt's others |
| Tokens | decode | Delta; at the answer's end Linger, or Release after a stop string |
| Finished | decode | Delta, Linger |
| Refused | decode | Release, and Retry at once: the ticket keeps its place |
| PrefillFailed, DecodeFailed | either | Release, and Retry after a pause; Release alone when patience ends |
| RetryDue | a timer | Start |
| (a second passes) | | as DecodeFailed where decode's stream is silent |

| action | carried out by |
| --- | --- |
| Start | `_Run._start`: an `Attempt`, which matches, waits for a permit, places, and calls decode |
| Compute | `Attempt.compute`: calls prefill |
| Delta | `Dispatch.run`: yields it |
| Release | `_Run._release`: cancels both calls, avoids the instances that failed for a while |
| Retry | `_Run._retry`: a timer, at whose end comes RetryDue |
| Linger | `Dispatch._keep`: lets decode's stream end by itself |

When a choice has failed for good, all others get `Release` and the turn's error is raised.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count

from kvcommons.errors import DeadlineExceeded, KVCommonsError
from kvcommons.rblock.identity import IdentityChain
from services.router.answer.parts import joined
from services.router.capacity.queue import Ticket
from services.router.capacity.queues import CapacityQueues
from services.router.fleet.fleet import Fleet
from services.router.turn import events as ev
from services.router.turn.attempt import Attempt, RequestContext
from services.router.turn.choice import Phase
from services.router.turn.turn import Turn

_TICK_S = 1.0
# How long an instance that failed this turn is passed over by it, if there is another.
_AVOID_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceUnderWay:
    """A choice under way, for people who watch: nothing of who asked for it, or of what it says."""

    name: str  # the request's number at this router, and the choice's in it
    phase: Phase
    prompt_tokens: int
    tokens: int
    block_tokens: int
    prefill: str  # ids of instances; empty while it has none
    decode: str
    borrowed: Mapping[str, int]  # blocks by the holder's id
    resumptions: int


class Dispatch:
    def __init__(self, fleet: Fleet, clock: Callable[[], float] = time.monotonic) -> None:
        self.queues = CapacityQueues(fleet, clock)
        self._fleet = fleet
        self._clock = clock
        self._requests = count()  # as the request queue lets them start
        self._runs: dict[int, _Run] = {}  # under way, by their number
        self._lingering: set[asyncio.Task[None]] = set()

    async def run(
        self, turn: Turn, request: RequestContext, *, lost: Callable[[], KVCommonsError | None]
    ) -> AsyncGenerator[list[ev.Delta], None]:
        """Yields what the client may see, as it comes; returns when all choices have finished.

        `lost` says why the turn may not go on (its session's lease was lost). Close the generator to cancel
        the turn: both calls of each attempt end. Raises the turn's error, or DeadlineExceeded.
        """
        number = next(self._requests)
        run = _Run(turn, request, self._fleet, self.queues, number, self._clock)
        self._runs[number] = run
        try:
            run.carry_out(turn.begin())
            while not turn.done:
                deltas = await run.advance()
                if deltas:
                    yield deltas
                if turn.error is not None:
                    raise turn.error
                if (reason := lost()) is not None:
                    raise reason
        finally:
            del self._runs[number]
            self._keep(run.close())

    def sequences(self) -> Iterator[SequenceUnderWay]:
        """Those under way, oldest request first."""
        for run in self._runs.values():
            yield from run.sequences()

    async def close(self) -> None:
        """Ends what still lingers."""
        for task in self._lingering:
            task.cancel()
        await asyncio.gather(*self._lingering, return_exceptions=True)

    def _keep(self, lingering: list[Attempt]) -> None:
        for attempt in lingering:
            task = asyncio.create_task(attempt.linger())
            self._lingering.add(task)
            task.add_done_callback(self._lingering.discard)


class _Run:
    def __init__(
        self,
        turn: Turn,
        request: RequestContext,
        fleet: Fleet,
        queues: CapacityQueues,
        number: int,
        clock: Callable[[], float],
    ) -> None:
        """`number`: of requests as the request queue let them start: their order where they wait for room."""
        self._turn = turn
        self._request = request
        self._fleet = fleet
        self._queues = queues
        self._number = number
        self._tickets: dict[int, Ticket] = {}  # of each choice
        self._clock = clock
        self._events: list[ev.Event] = []
        self._wake = asyncio.Event()
        self._attempts: dict[int, Attempt] = {}  # of each choice
        self._lingering: list[Attempt] = []
        self._chains: dict[int, IdentityChain] = {}
        self._avoid: dict[str, float] = {}  # instance id to when it is forgiven
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._tick_s = clock() + _TICK_S

    async def advance(self) -> list[ev.Delta]:
        """Waits for events, or for the next tick, and gives what they let the client see, one delta a
        choice."""
        now_s = self._clock()
        if now_s >= self._request.deadline_s:
            late = DeadlineExceeded("the request's deadline passed before its answer was complete")
            raise self._turn.waits_for or late
        if not self._events:
            try:
                async with asyncio.timeout(max(0.0, min(self._tick_s, self._request.deadline_s) - now_s)):
                    await self._wake.wait()
            except TimeoutError:
                pass
        self._wake.clear()
        heard, self._events = self._events, []
        now_s = self._clock()
        found: list[ev.Delta] = []
        for event in heard:
            found += self.carry_out(self._turn.handle(event, now_s))
        if now_s >= self._tick_s:
            self._tick_s = now_s + _TICK_S
            found += self.carry_out(self._turn.tick(now_s))
        deltas: dict[int, ev.Delta] = {}
        for delta in found:
            before = deltas.get(delta.choice)
            deltas[delta.choice] = _joined(before, delta) if before else delta
        return list(deltas.values())

    def sequences(self) -> Iterator[SequenceUnderWay]:
        for choice in self._turn.choices:
            if choice.ended:
                continue
            attempt = self._attempts.get(choice.index)
            pair = attempt.pair if attempt is not None else None
            yield SequenceUnderWay(
                name=f"{self._number}.{choice.index}",
                phase=choice.phase,
                prompt_tokens=len(choice.prompt),
                tokens=len(choice.prompt) + len(choice.answer.tokens),
                block_tokens=self._request.model.block_tokens,
                prefill=pair.prefill.id if pair is not None else "",
                decode=pair.decode.id if pair is not None else "",
                borrowed=dict(attempt.borrowed) if attempt is not None else {},
                resumptions=choice.resumptions,
            )

    def carry_out(self, actions: list[ev.Action]) -> list[ev.Delta]:
        deltas: list[ev.Delta] = []
        for action in actions:
            match action:
                case ev.Delta():
                    deltas.append(action)
                case ev.Start():
                    self._start(action.choice)
                case ev.Compute():
                    self._attempts[action.choice].compute(action.push_from_block)
                case ev.Release():
                    self._release(action)
                case ev.Linger():
                    self._lingering.append(self._attempts.pop(action.choice))
                case ev.Retry():
                    self._retry(action)
                case _:
                    raise AssertionError(f"no such action: {action!r}")
        return deltas

    def close(self) -> list[Attempt]:
        """Cancels what is under way; gives the attempts that may end by themselves."""
        for timer in self._timers.values():
            timer.cancel()
        for attempt in self._attempts.values():
            attempt.close()
        self._attempts.clear()
        for ticket in self._tickets.values():
            self._queues.leave(ticket, self._request.model)
        lingering, self._lingering = self._lingering, []
        return lingering

    def _start(self, index: int) -> None:
        choice = self._turn.choices[index]
        tokens = choice.tokens
        chain = self._chains.get(index)
        if chain is None:
            chain = self._chains[index] = self._request.chain()
        chain.extend(tokens[chain.tokens :])
        now_s = self._clock()
        ticket = self._tickets.setdefault(index, Ticket(order=(self._number, index)))
        self._avoid = {instance: until for instance, until in self._avoid.items() if until > now_s}
        self._attempts[index] = Attempt(
            request=self._request,
            choice=choice,
            block_ids=chain.ids,
            fleet=self._fleet,
            queues=self._queues,
            ticket=ticket,
            failed=frozenset(self._avoid),
            emit=self._deliver,
            clock=self._clock,
        )

    def _release(self, action: ev.Release) -> None:
        attempt = self._attempts.pop(action.choice, None)
        if attempt is None:
            return
        attempt.close()
        if not attempt.refused:
            # Not used again: the attempt that had it may still be about to end.
            self._queues.leave(self._tickets.pop(action.choice), self._request.model)
        until_s = self._clock() + _AVOID_S
        self._avoid.update(dict.fromkeys(attempt.failed_ids, until_s))

    def _retry(self, action: ev.Retry) -> None:
        due = ev.RetryDue(choice=action.choice, attempt=action.attempt)
        loop = asyncio.get_running_loop()
        self._timers[action.choice] = loop.call_later(action.delay_s, self._deliver, due)

    def _deliver(self, event: ev.Event) -> None:
        self._events.append(event)
        self._wake.set()


def _joined(before: ev.Delta, after: ev.Delta) -> ev.Delta:
    return ev.Delta(
        choice=before.choice,
        attempt=after.attempt,
        parts=joined((*before.parts, *after.parts)),
        tokens=before.tokens + after.tokens,
    )
