"""How the stages of a group find each other: all of them are in the registry, and the first one puts them
together, again and again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvcommons.errors import KVCommonsError
from kvcommons.pb import ledger_pb2 as pb
from kvcommons.rpc.directory import Directory
from kvcommons.stages.group import StageAddress, StageGroup

log = logging.getLogger(__name__)

STAGE_SERVICE = "prefill_stage"
LOOK_S = 1.0  # between looks where the registry does not change
AGAIN_S = 0.5  # after an attempt that failed


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShare:
    """Which stage of which group a process is, and the layers of all stages. The settings say it, to each
    process alike."""

    group: str
    number: int
    ranges: tuple[range, ...]

    @property
    def layers(self) -> range:
        return self.ranges[self.number]

    def message(self) -> pb.StagePart:
        return pb.StagePart(
            group=self.group,
            number=self.number,
            stages=len(self.ranges),
            first_layer=self.layers.start,
            layers=len(self.layers),
        )


def members(
    share: StageShare, model: bytes, instances: Iterable[pb.Instance]
) -> tuple[list[StageAddress], str]:
    """The stages behind the first, in order, and what is wrong with them, for people: empty where they can be
    put together."""
    by_number: dict[int, list[pb.Instance]] = {}
    for instance in _living(instances):
        if instance.stage.group == share.group:
            by_number.setdefault(instance.stage.number, []).append(instance)
    found = []
    for number, layers in enumerate(share.ranges[1:], 1):
        there = [one for one in by_number.get(number, []) if one.load.ready]
        if not there:
            return [], f"stage {number} of group {share.group!r} is not there, or not ready: start it"
        if len(there) > 1:
            ids = ", ".join(sorted(one.id for one in there))
            return [], f"group {share.group!r} has stage {number} more than once ({ids}): start one of it"
        (one,) = there
        theirs = range(one.stage.first_layer, one.stage.first_layer + one.stage.layers)
        if one.stage.stages != len(share.ranges) or theirs != layers:
            return [], (
                f"stage {number} of group {share.group!r} has layers {_text(theirs)} of {one.stage.stages} "
                f"stages, and {_text(layers)} of {len(share.ranges)} are due: start all with the same stages "
                "and stage_layers"
            )
        if one.model.fingerprint != model:
            return [], (
                f"stage {number} of group {share.group!r} has another model: start all stages with one "
                "model, dtype and block_tokens"
            )
        found.append(StageAddress(number=number, data_address=one.data_address))
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
            instances = self._directory.instances(STAGE_SERVICE, ready=False)
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
