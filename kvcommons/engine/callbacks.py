"""What the engine tells, and what it asks of the world around it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from kvcommons.engine.iteration_timing import IterationTiming
from kvcommons.engine.sequence import RemoteRun, Sequence
from kvcommons.errors import KVCommonsError
from kvcommons.pb import common_pb2 as pb


@dataclass(slots=True, kw_only=True)
class SequenceUpdate:
    """What a sequence has to tell after an iteration. `reason` or `error` is set with its last one;
    `borrowed` (blocks by their holder's data address) where that is not as it was told before."""

    key: int
    tokens: list[pb.SampledToken] = field(default_factory=list)
    reason: str = ""  # "stop" or "length"
    error: KVCommonsError | None = None
    saved_blocks: int = 0
    borrowed: dict[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Movable:
    """The leading `blocks` of a sequence's borrowed run are sealed: copies may take their place."""

    key: int
    request_id: str
    run: RemoteRun
    first_block: int  # of the sequence; the run's, as long as nothing of it has moved
    blocks: int
    tokens_left: int  # that the sequence may still generate
    comes_home: bool  # by its sequence's policy, when there is room

    @classmethod
    def of(cls, sequence: Sequence, run: RemoteRun) -> Movable:
        return cls(
            key=sequence.key,
            request_id=sequence.request.request_id,
            run=run,
            first_block=run.first_block,
            blocks=sequence.movable(run),
            tokens_left=sequence.request.max_position - len(sequence.tokens),
            comes_home=sequence.placement.comes_home(),
        )


class EngineCallbacks(Protocol):
    """What the engine asks of the world, on its thread and, where it is on behalf of one sequence, in that
    one's context; nothing here may block."""

    def deliver(self, steps: list[SequenceUpdate]) -> None:
        """An iteration's tokens and ends."""

    def borrow(self, sequence: Sequence) -> None:
        """Room for a sequence's next tokens on another holder; the engine hears `grown` or `refused`."""

    def give_back(self, runs: list[RemoteRun]) -> None:
        """Borrowed blocks that are not needed any more."""

    def save_remote(self, run: RemoteRun, sequence: Sequence, index: int) -> None:
        """Block `index` of the sequence, which lies in `run`, is full: its holder should save it."""


class EngineMetrics(Protocol):
    """What the engine reports, on its thread."""

    def iteration(self, batch: int, timing: IterationTiming) -> None:
        """Of `batch` sequences."""

    def verified(self, drafted: int, accepted: int) -> None:
        """Of an iteration: so many drafts were computed, and so many of them were what came."""

    def ended(self, step: SequenceUpdate) -> None:
        """A sequence, for a reason or with an error."""
