"""Where a prompt's blocks go: the segments of its sequence, by holder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvcommons.pb import common_pb2 as pb
from kvcommons.rblock.heads import HeadPart, divided


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A segment at a holder's data address."""

    data_address: str
    handle: int
    epoch: int
    layers: range | None = None  # that it takes; None: all
    heads: HeadPart | None = None  # of the model's, that it takes; None: all


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A run of the sequence's blocks at the holder that will attend over them, at the `parts` of a head
    group, each of which takes its heads of them, or at its pipeline `stages`, which take their layers, and
    of these their ranks' heads, where a stage has several."""

    data_address: str
    handle: int
    epoch: int
    first_block: int
    blocks: int
    parts: tuple[Place, ...] = ()
    stages: tuple[Place, ...] = ()

    @property
    def places(self) -> tuple[Place, ...]:
        """One, or the parts in order."""
        alone = Place(data_address=self.data_address, handle=self.handle, epoch=self.epoch)
        return self.parts or (alone,)

    def places_of(self, layer: int) -> tuple[Place, ...]:
        """Where this layer goes, whose heads are divided alike: as `places`, but for stages."""
        return tuple(one for one in self.stages if one.layers and layer in one.layers) or self.places

    @property
    def head_parts(self) -> int:
        """Into how many its KV heads are divided."""
        first = (self.stages or self.places)[0]
        return 1 if first.heads is None else first.heads.parts

    @classmethod
    def of(cls, placement: pb.SegmentPlace) -> Target:
        return cls(
            data_address=placement.data_address,
            handle=placement.handle,
            epoch=placement.epoch,
            first_block=placement.first_block,
            blocks=placement.blocks,
            parts=tuple(
                Place(data_address=part.data_address, handle=part.handle, epoch=part.epoch, heads=heads)
                for part, heads in zip(placement.parts, divided(len(placement.parts)), strict=True)
            ),
            stages=tuple(
                Place(
                    data_address=stage.data_address,
                    handle=stage.handle,
                    epoch=stage.epoch,
                    layers=range(stage.first_layer, stage.first_layer + stage.layers),
                    heads=HeadPart.of(stage.heads) if stage.HasField("heads") else None,
                )
                for stage in placement.stages
            ),
        )


class TargetTable:
    """The targets of one prompt, in the order of its blocks; others may join while it is computed. One thread
    adds, any may read."""

    def __init__(self, places: Iterable[pb.SegmentPlace]) -> None:
        self.places: tuple[pb.SegmentPlace, ...] = ()  # as decode named them; those of `now`, or more
        self.now: tuple[Target, ...] = ()
        self.add(places)

    @property
    def blocks(self) -> int:
        """Leading ones of the sequence that have a target."""
        return max((target.first_block + target.blocks for target in self.now), default=0)

    def add(self, places: Iterable[pb.SegmentPlace]) -> None:
        self.places = (*self.places, *places)
        self.now = tuple(map(Target.of, self.places))


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """Blocks `first` … of a sequence (indices in it) that go to one target."""

    target: Target
    first: int
    count: int


def writes(targets: Iterable[Target], first: int, count: int) -> list[Write]:
    """Which targets blocks [first, first + count) of a sequence go to, and which of them to each."""
    found = []
    for target in targets:
        begin = max(first, target.first_block)
        end = min(first + count, target.first_block + target.blocks)
        if begin < end:
            found.append(Write(target=target, first=begin, count=end - begin))
    return found
