"""An epoch of a group of stages: one life of it, from when all have joined until anything goes wrong."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from torch import Tensor

from kvcommons.pb import data_pb2 as pb
from kvcommons.prefill.push import Delivery
from kvcommons.stages.history import StagedLoad
from kvcommons.stages.iteration import StageIteration
from kvcommons.stages.outstanding import OutstandingWork


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAddress:
    """A process of the group beside the first, and where it is reached on the data plane."""

    number: int  # in the group: stage after stage, of each rank after rank
    data_address: str


class EpochState:
    """One life of the group, from where the first stage is: what it has under way with the others. How they
    are reached is what differs."""

    def __init__(self, number: int, members: Sequence[StageAddress], *, stages: int) -> None:
        self.number = number
        self.members = members
        self.numbers = tuple(member.number for member in members)
        self.outstanding = OutstandingWork[StageIteration](self.numbers, iterations_max=stages)
        self.generating: dict[int, int] = {}  # sequences, with how many of their blocks the others know
        self.iterations = 0  # that have left the line
        self.busy_s = [0.0] * stages  # of the first rank of each
        self.deliveries: dict[int, Delivery] = {}
        self.loads: dict[int, StagedLoad] = {}
        self.grammars: dict[int, Future[None]] = {}  # by number: done once the last stage has compiled it

    def join(self, writer: str) -> None:
        """Returns once all stages belong to it; they save as `writer`. Raises what one of them raises."""
        raise NotImplementedError

    def follow(self) -> None:
        """Hears what they report, from now on."""
        raise NotImplementedError

    def send(
        self,
        changes: Sequence[pb.StageChange],
        spans: Sequence[pb.StageSpan] = (),
        iteration: StageIteration | None = None,
    ) -> None:
        """Down the line, in order; changes alone go to the ranks beside this one, too. What is wrong with it
        ends the epoch, after what the engine does now."""
        raise NotImplementedError

    def share(self, spans: Sequence[pb.StageSpan], hidden: Tensor) -> None:
        """An iteration that begins, with what enters the first layer, to the ranks beside this one."""
        raise NotImplementedError

    def close(self) -> None:
        """It has ended."""
        raise NotImplementedError
