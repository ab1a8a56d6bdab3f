"""Blocks of sequences that lie on other holders, as the stages of an instance tell each other: the first one
borrows them, and each attends there over its own layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvcommons.engine.sequence import LocalRun, RemoteRun, Run
from kvcommons.holder.client import RemoteHolder
from kvcommons.holder.head_group import Creditor, HeadGroup
from kvcommons.holder.segments import SegmentRef
from kvcommons.pb import data_pb2 as pb
from kvcommons.rblock.heads import HeadPart
from kvcommons.rblock.layout import Layout
from kvcommons.rpc.dialer import UNSECURED, Dialer


def run_message(run: Run) -> pb.SequenceRun:
    """What `AttendedHolders.runs` makes a run of."""
    if isinstance(run, LocalRun):
        return pb.SequenceRun(blocks=run.blocks)
    return pb.SequenceRun(place=run.place(), segment_block=run.segment_block)


class AttendedHolders:
    """Those that a stage behind the first attends at, in an epoch. Belongs to the epoch's thread, but for
    `forget`."""

    def __init__(self, layout: Layout, heads: HeadPart | None = None, dialer: Dialer = UNSECURED) -> None:
        """`layout`: of all heads. `heads`: of which this process has queries; None: all."""
        self._layout = layout
        self._heads = heads
        self._dialer = dialer
        self._holders: dict[tuple[str, ...], Creditor] = {}  # by data addresses, several of a head group

    def close(self) -> None:
        """After the last layer."""
        for holder in self._holders.values():
            holder.close_data()

    def runs(self, messages: Iterable[pb.SequenceRun], first_block: int) -> Iterator[Run]:
        """From this block of their sequence on."""
        for message in messages:
            run: Run
            if message.blocks:
                run = LocalRun(first_block=first_block, blocks=list(message.blocks))
            else:
                run = self._remote(message, first_block)
            yield run
            first_block += run.count

    def forget(self, runs: Iterable[RemoteRun]) -> None:
        """Nothing more is asked of them."""
        for run in runs:
            if isinstance(run.holder, HeadGroup):
                run.holder.forget(run.ref)

    def _remote(self, message: pb.SequenceRun, first_block: int) -> RemoteRun:
        place = message.place
        ref = SegmentRef(handle=place.handle, epoch=place.epoch)
        addresses = tuple(part.data_address for part in place.parts) or (place.data_address,)
        holder = self._holders.get(addresses)
        if holder is None:
            holder = self._holders[addresses] = self._open(addresses)
        if isinstance(holder, HeadGroup):
            holder.know(ref, [SegmentRef(handle=part.handle, epoch=part.epoch) for part in place.parts])
        return RemoteRun(
            first_block=first_block,
            count=place.blocks,
            holder=holder,
            ref=ref,
            segment_block=message.segment_block,
        )

    def _open(self, addresses: tuple[str, ...]) -> Creditor:
        if len(addresses) == 1:
            return RemoteHolder(
                "", addresses[0], owner="", model=b"", lost=lambda refs: None, dialer=self._dialer
            )
        return HeadGroup(
            [("", address) for address in addresses],
            self._layout,
            owner="",
            model=b"",
            store=None,
            lost=lambda refs: None,
            dialer=self._dialer,
            heads=self._heads,
        )
