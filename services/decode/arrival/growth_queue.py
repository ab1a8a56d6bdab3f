"""Which of the prompts that want another holder asks for memory, and which gives up when there is none. Pure:
the clock and the random source are passed in.

A router begins a prompt when there is room for all of it beside what is promised to those that have begun
(`Load.promised_blocks`), as far as it knows. Where that was wrong, prompts that hold some memory and wait for
more could wait for each other for ever. They cannot:

- Of one instance the oldest that waits asks alone, so what comes free is divided among none of the others.
- The younger ones have a quarter of its patience. So they give up before it does, and give back all that they
  hold; and none that is new begins while one waits. So of what the instance has lent to prompts the oldest
  gets what it needs, ends, and the next oldest follows.
- Instances do not know each other's prompts. Each patience is drawn anew from the upper half of the setting:
  where the oldest prompts of two instances wait for each other, one gives up first, and the other goes on
  with what that held. That both give up within one pause is the less likely the longer patience is beside a
  pause, and it is drawn anew each time.

Whoever gives up begins again where the router has it wait for room, with what the store has of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_YOUNGER = 4  # a younger one's patience, as a part of the oldest one's


@dataclass(frozen=True, slots=True)
class _Waiting:
    since_s: float
    patience_s: float


class GrowthQueue:
    """Of one instance. Keys are of sequences: a smaller one is older."""

    def __init__(self, *, wait_s: float, draw: Callable[[], float]) -> None:
        """`wait_s`: for memory, at most. `draw`: from 0 to 1."""
        self._wait_s = wait_s
        self._draw = draw
        self._waiting: dict[int, _Waiting] = {}

    @property
    def any_waits(self) -> bool:
        """Nobody else should begin to grow."""
        return bool(self._waiting)

    def may_ask(self, key: int) -> bool:
        """Whether no older one waits."""
        return key <= min(self._waiting, default=key)

    def waits(self, key: int, now_s: float) -> None:
        """It wants memory, and there is none or an older one is before it."""
        if key not in self._waiting:
            self._waiting[key] = _Waiting(now_s, self._wait_s * (1 + self._draw()) / 2)

    def gives_up(self, key: int, now_s: float) -> bool:
        """Whether one that waits has waited as long as it may by its place among them."""
        waiting = self._waiting[key]
        patience_s = waiting.patience_s if self.may_ask(key) else waiting.patience_s / _YOUNGER
        return now_s - waiting.since_s >= patience_s

    def ended(self, key: int) -> None:
        """It got its memory, or wants none any more."""
        self._waiting.pop(key, None)
