"""A creditor as its debtor sees it: one holder (`RemoteHolder`), or several that divide the KV heads between
them (`HeadGroup`). RemoteHolder says what each method does and raises."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvcommons.holder.exchange import Recipient
from kvcommons.holder.plan import PlanRow
from kvcommons.holder.segments import SegmentRef
from kvcommons.transport.deadline import Deadline

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSave:
    """Full blocks of a segment, on their way to a kvstore."""

    store: str  # its data address
    tenant: str
    parent: bytes  # identity of the block before them; empty at the sequence's beginning
    block_ids: Sequence[bytes]
    first_block: int  # within the segment
    first_index: int  # the same block's, within the sequence


class Creditor(Protocol):
    """The coroutines belong to the event loop; data operations block, may come from any thread, and run at
    the same time."""

    waited: Callable[[float, bool], None]

    @property
    def control_address(self) -> str:
        """For logs; of a head group, all of them."""

    @property
    def data_address(self) -> str:
        """The same; it names the creditor among others."""

    @property
    def borrowed(self) -> list[SegmentRef]: ...

    def start(self) -> None: ...

    async def close(self) -> None: ...

    async def reserve(
        self, sequence: str, blocks: int, *, first_position: int, shift: int = 0, timeout_s: float
    ) -> SegmentRef: ...

    async def grow(self, ref: SegmentRef, blocks: int, *, timeout_s: float) -> None: ...

    async def release(self, refs: Iterable[SegmentRef], *, timeout_s: float) -> None: ...

    async def load(
        self,
        ref: SegmentRef,
        store_address: str,
        block_ids: Sequence[bytes],
        *,
        first_block: int,
        store_control: str = "",
        timeout_s: float,
    ) -> int: ...

    async def save(self, ref: SegmentRef, blocks: BlockSave, *, timeout_s: float) -> None: ...

    async def freeze(self, ref: SegmentRef, until_block: int, *, timeout_s: float) -> SegmentRef: ...

    async def thaw(self, ref: SegmentRef, *, timeout_s: float) -> None: ...

    async def trim(self, ref: SegmentRef, *, settlement: str = "", timeout_s: float) -> int: ...

    async def copy_in(
        self,
        into: SegmentRef,
        data_address: str,
        source: SegmentRef,
        *,
        first_block: int,
        source_block: int,
        blocks: int,
        timeout_s: float,
    ) -> None: ...

    def write_blocks(
        self, ref: SegmentRef, layer: int, first_block: int, objects: Sequence[Buffer], deadline: Deadline
    ) -> None: ...

    def read_blocks(
        self, ref: SegmentRef, layer: int, first_block: int, into: Sequence[Buffer], deadline: Deadline
    ) -> None: ...

    def recipients(self, rows: Sequence[PlanRow]) -> Sequence[Recipient]:
        """Who attends over such rows: for a LayerExchange."""
