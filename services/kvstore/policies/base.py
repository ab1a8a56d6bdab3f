"""The interface of all eviction policies, and what those that do not look at the queue share.

A policy orders the blocks of one tier. It follows what comes and goes, and names one victim at a time;
it never does anything itself. The live store and the trace replay drive the same classes; keys are block
identities there and numbers here.

A *run* is the blocks of one prompt, in order from its first token, each once: a
block is of use only with all before it.
A *job* is a number that grows along the queue: of two waiting jobs, the smaller is served first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, TypeVar

K = TypeVar("K", bound=Hashable)


class Policy(Protocol[K]):
    """Order of eviction in one tier."""

    def expect(self, job: int, run: Sequence[K]) -> None:
        """A job joined the queue. When it starts, it will want `run`."""

    def forget(self, job: int, run: Sequence[K]) -> None:
        """The job left the queue without being served: its client went away."""

    def move(self, job: int, to: int, run: Sequence[K]) -> None:
        """A job that waits has another place in the queue now, and with it another number."""

    def use(self, job: int, run: Sequence[K], hits: int) -> None:
        """The job is served: it found the first `hits` blocks of `run`, and the others are made for it.

        Those that came into the tier for it are admitted already. Not every job was expected.
        """

    def admit(self, block: K, after: K | None = None) -> None:
        """The block came into the tier. `after`: the one that it continues, which may
        not be in the tier, where no run has told or will."""

    def remove(self, block: K) -> None:
        """The block left the tier, for whatever reason; one that is not in it is ignored."""

    def victim(self, pinned: Callable[[K], bool]) -> K | None:
        """The block to go next, passing over pinned ones; None where all are. `remove` takes it out."""


class QueueBlind:
    """What a policy that knows only the past does with news of the queue: nothing."""

    def expect(self, job: int, run: Sequence[Hashable]) -> None:
        """Not looked at."""

    def forget(self, job: int, run: Sequence[Hashable]) -> None:
        """Not looked at."""

    def move(self, job: int, to: int, run: Sequence[Hashable]) -> None:
        """Not looked at."""


def nothing_pinned(block: Hashable) -> bool:
    """For tiers whose blocks can all go."""
    return False
