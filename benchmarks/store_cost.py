"""What does the store cost where nothing is reused? New conversations, each turn taken twice: once as ever,
so that all of its KV is saved, and once with `reuse` off, so that none is. Which goes first alternates. Both
have the same prompt: what the one saves the other does not look for, and it is deleted before the next.

CPU-seconds are those of all processes of the stack, the disk's writers among them: a turn ends when its
blocks are on disk, so what it caused is in its own figure. They are read from the processes' clocks, for the
ticks in /proc/PID/stat are 10 ms, half of what is to be seen in all of them together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.report import Report, Row, p50
from devstack.running import RunningStack
from kvcommons.errors import Internal

Writer = Callable[[int, int], str]
Progress = Callable[[str], None]
WARM_UP = 2  # pairs that count for nothing
SETTLE_S = 0.3  # in which a deleted session's blocks go; that is nobody's turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    cpu_by_process_s: Mapping[str, float]
    wall_s: float

    @property
    def cpu_s(self) -> float:
        return sum(self.cpu_by_process_s.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class CostPair:
    with_store: Cost
    without: Cost


def measure(
    stack: RunningStack,
    write: Writer,
    *,
    pairs: int,
    prompt_tokens: int,
    answer_tokens: int,
    progress: Progress,
) -> list[CostPair]:
    made: list[CostPair] = []
    for number in range(WARM_UP + pairs):
        progress(f"pair {number + 1} of {WARM_UP + pairs}")
        costs: dict[bool, Cost] = {}
        for reuse in (True, False) if number % 2 else (False, True):
            session, message = f"cost-{number}-{reuse}", write(number, prompt_tokens)
            began_s, before_s = time.monotonic(), cpu_by_process_s(stack)
            turn = stack.client.say(
                message, session, max_tokens=answer_tokens, ignore_eos=True, temperature=0.0, reuse=reuse
            )
            wall_s = time.monotonic() - began_s
            used_s = {
                name: now_s - before_s.get(name, 0.0) for name, now_s in cpu_by_process_s(stack).items()
            }
            costs[reuse] = Cost(cpu_by_process_s=used_s, wall_s=wall_s)
            if turn.cached_tokens:
                raise Internal(f"{turn.cached_tokens} tokens were reused, where nothing was to be")
            stack.client.delete_session(session)
            time.sleep(SETTLE_S)
        if number >= WARM_UP:
            made.append(CostPair(with_store=costs[True], without=costs[False]))
    return made


def cpu_by_process_s(stack: RunningStack) -> dict[str, float]:
    """What each of the stack's processes has used so far, by its name."""
    used_s: dict[str, float] = {}
    for process in stack.processes():
        try:
            process_s = cpu_clock_s(process.pid)
        except OSError:
            continue  # it has ended
        used_s[process.name] = used_s.get(process.name, 0.0) + process_s
    return used_s


def cpu_clock_s(pid: int) -> float:
    """What a process has used, with all threads that it ever had, to the nanosecond. Raises OSError where it
    has ended."""
    return time.clock_gettime((~pid << 3) | 2)  # what clock_getcpuclockid(3) makes of it on Linux


def summarise(title: str, pairs: Sequence[CostPair]) -> Report:
    """Ratios are medians over pairs, with the store over without."""
    rows: list[Row] = []
    for how, costs in (
        ("saved", [pair.with_store for pair in pairs]),
        ("not saved", [pair.without for pair in pairs]),
    ):
        row: dict[str, str | int | float] = {
            "how": how,
            "turns": len(costs),
            "CPU ms": p50([cost.cpu_s * 1000 for cost in costs]),
            "wall ms": p50([cost.wall_s * 1000 for cost in costs]),
        }
        for name in sorted({name for cost in costs for name in cost.cpu_by_process_s}):
            row[f"CPU ms of {name}"] = p50([cost.cpu_by_process_s.get(name, 0.0) * 1000 for cost in costs])
        rows.append(row)
    ratios = {
        "cpu": p50([pair.with_store.cpu_s / pair.without.cpu_s for pair in pairs]),
        "wall": p50([pair.with_store.wall_s / pair.without.wall_s for pair in pairs]),
    }
    return Report(title=title, ratios=ratios, rows=rows)
