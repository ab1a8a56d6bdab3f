"""What the first stage of a group waits for from the others. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence


class OutstandingWork:
    """Of one epoch: iterations that have left the first stage and not the last one, and blocks of prompts
    that some stage may still read or write, whatever has become of the prompt."""

    def __init__(self, followers: Collection[int], *, iterations_max: int) -> None:
        """`followers`: numbers of the stages behind the first."""
        self._followers = frozenset(followers)
        self._iterations_max = iterations_max
        self._since_s = deque[float]()  # of each iteration under way, oldest first
        self._blocks: dict[int, tuple[int, ...]] = {}  # by prompt
        self._using: dict[int, set[int]] = {}  # stages, by prompt
        self._delivering: dict[int, set[int]] = {}  # likewise

    @property
    def full(self) -> bool:
        """Whether one more iteration would only wait, and hold up whoever comes next."""
        return len(self._since_s) >= self._iterations_max

    @property
    def iterations(self) -> int:
        return len(self._since_s)

    def late(self, now_s: float, iteration_s: float) -> bool:
        """Whether one has been under way for longer than any should be."""
        return bool(self._since_s) and now_s - self._since_s[0] > iteration_s

    @property
    def prompts(self) -> list[int]:
        """Whose blocks are held."""
        return list(self._using)

    def passed_on(self, now_s: float) -> None:
        self._since_s.append(now_s)

    def done(self, iterations: int) -> None:
        """Raises ValueError for more than there are."""
        if iterations > len(self._since_s):
            raise ValueError(f"{iterations} iterations are done, of {len(self._since_s)} under way")
        for _ in range(iterations):
            self._since_s.popleft()

    def begin(self, prompt: int, blocks: Sequence[int]) -> None:
        """The caller holds a reference on each of these blocks until `ended` gives them back."""
        assert prompt not in self._using, "a prompt begins once"
        self._blocks[prompt] = tuple(blocks)
        self._using[prompt] = set(self._followers)
        self._delivering[prompt] = set(self._followers)

    def begun(self, prompt: int) -> bool:
        return prompt in self._using

    def delivered(self, prompt: int, stage: int) -> bool:
        """Whether that was still waited for: a stage says it once."""
        waiting = self._delivering.get(prompt, set())
        if stage not in waiting:
            return False
        waiting.remove(stage)
        return True

    def ended(self, prompt: int, stage: int) -> tuple[int, ...]:
        """Blocks that no stage uses any more: the prompt's, once all stages have ended it."""
        using = self._using.get(prompt)
        if using is None:
            return ()
        using.discard(stage)
        if using:
            return ()
        return self._forget(prompt)

    def abandon(self) -> tuple[list[int], list[tuple[int, int]]]:
        """The epoch is over: all blocks that were held, and (prompt, stage) of deliveries that will not be
        reported."""
        undelivered = [
            (prompt, stage) for prompt, stages in self._delivering.items() for stage in sorted(stages)
        ]
        blocks = [block for prompt in list(self._using) for block in self._forget(prompt)]
        self._since_s.clear()
        return blocks, undelivered

    def _forget(self, prompt: int) -> tuple[int, ...]:
        del self._using[prompt], self._delivering[prompt]
        return self._blocks.pop(prompt)
