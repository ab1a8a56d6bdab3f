"""How the stages of a group find each other: all of them are in the registry, and the first one puts them
together, again and again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvcommons.errors import KVCommonsError
from kvcommons.model.tensor_rank import ALONE, TensorRank
from kvcommons.pb import ledger_pb2 as pb
from kvcommons.rpc.directory import Directory
from kvcommons.stages.division import LayerDivision
from kvcommons.stages.epoch import StageAddress
from kvcommons.stages.group import StageGroup

log = logging.getLogger(__name__)

LOOK_S = 1.0  # between looks where the registry does not change
AGAIN_S = 0.5  # after an attempt that failed


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShare:
    """Which stage of which group a process is, and which rank of it, and the layers of all stages."""

    service: str  # "prefill" or "decode"
    group: str
    number: int
    division: LayerDivision
    rank: TensorRank = ALONE

    @property
    def ranges(self) -> tuple[range, ...]:
        return self.division.ranges

    @property
    def alone(self) -> bool:
        """Whether the group has this process only."""
        return len(self.ranges) * self.rank.ranks == 1

    @property
    def layers(self) -> range:
        return self.ranges[self.number]

    @property
    def of_iterations(self) -> float:
        """What this stage takes of what all of them do, as far as is known."""
        times = self.division.times
        return times.of(self.layers) / times.of(range(len(times.layers)))

    def message(self) -> pb.StagePart:
        return pb.StagePart(
            group=self.group,
            number=self.number,
            stages=len(self.ranges),
            first_layer=self.layers.start,
            layers=len(self.layers),
            rank=self.rank.number,
            ranks=self.rank.ranks,
            division=map(len, self.ranges),
        )


def members(
    share: StageShare, model: bytes, instances: Iterable[pb.Instance]
) -> tuple[list[StageAddress], str]:
    """The processes beside the first, stage after stage and of each rank after rank, and what is wrong with
    them, for people: empty where they can be put together."""
    known: dict[tuple[int, int], list[pb.Instance]] = {}
    for instance in _living(instances):
        if instance.stage.group == share.group:
            known.setdefault((instance.stage.number, instance.stage.rank), []).append(instance)
    found, tensor = [], share.rank.ranks
    for member in range(1, len(share.ranges) * tensor):
        number, rank = divmod(member, tensor)
        layers, who = share.ranges[number], f"stage {number}" + (f", rank {rank}," if tensor > 1 else "")
        started = known.get((number, rank), [])
        there = [one for one in started if one.load.ready]
        others = {one.stage.stages for one in started} - {len(share.ranges)}
        if not there and others:
            return [], (
                f"{who} of group {share.group!r} is started as one of {max(others)} stages, and "
                f"{len(share.ranges)} are due: start all with the same stages"
            )
        if not there:
            return [], f"{who} of group {share.group!r} is not there, or not ready: start it"
        if len(there) > 1:
            ids = ", ".join(sorted(one.id for one in there))
            return [], f"group {share.group!r} has {who} more than once ({ids}): start one of it"
        (one,) = there
        if one.stage.ranks != tensor:
            return [], (
                f"{who} of group {share.group!r} has {one.stage.ranks} ranks a stage, and {tensor} are due: "
                "start all with the same tensor"
            )
        theirs = range(one.stage.first_layer, one.stage.first_layer + one.stage.layers)
        if one.stage.stages != len(share.ranges) or theirs != layers:
            return [], (
                f"{who} of group {share.group!r} has layers {_text(theirs)} of {one.stage.stages} "
                f"stages, and {_text(layers)} of {len(share.ranges)} are due: start all with the same stages "
                "and stage_layers"
            )
        if one.model.fingerprint != model:
            return [], (
                f"{who} of group {share.group!r} has another model: start all stages with one "
                "model, dtype and block_tokens"
            )
        found.append(StageAddress(number=member, data_address=one.data_address))
    return found, ""


def _living(instances: Iterable[pb.Instance]) -> list[pb.Instance]:
    """Of two at one address only the later lives."""
    living: dict[tuple[str, str], pb.Instance] = {}
    for one in sorted(instances, key=lambda one: one.started_ms):
        living[one.host, one.data_address] = one
    return list(living.values())


def _text(layers: range) -> str:
    return f"{layers.start} … {layers.stop - 1}"


class Formation:
    """Puts a group together whenever it is apart. Belongs to the event loop."""

    def __init__(self, group: StageGroup, share: StageShare, model: bytes, directory: Directory) -> None:
        self._group = group
        self._share = share
        self._model = model
        self._directory = directory
        self._apart = asyncio.Event()
        self._apart.set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="formation")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def changed(self) -> None:
        """An epoch has begun or ended."""
        if self._group.formed:
            self._apart.clear()
        else:
            self._apart.set()

    async def _run(self) -> None:
        while True:
            await self._apart.wait()
            instances = self._directory.instances(f"{self._share.service}_stage", ready=False)
            found, shortfall = members(self._share, self._model, instances)
            if not shortfall and await self._form(found):
                continue
            if shortfall and shortfall != self._group.shortfall:
                self._group.shortfall = shortfall
                log.info("waiting for stages: %s", shortfall)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S if shortfall else AGAIN_S):
                    await self._directory.changed()

    async def _form(self, found: Sequence[StageAddress]) -> bool:
        try:
            await asyncio.to_thread(self._group.form, found)
        except KVCommonsError as error:
            if error.message != self._group.shortfall:
                log.warning("the stages could not be put together: %s", error.message)
            self._group.shortfall = error.message
            return False
        self.changed()
        return True
