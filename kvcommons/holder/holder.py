"""A holder's memory and who has what of it: the one object that gRPC, the data plane and the owner process
share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvcommons.backend.memory import BlockMemory
from kvcommons.errors import InvalidInput
from kvcommons.holder.segments import SegmentTable
from kvcommons.rblock.allocator import BlockAllocator


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldModel:
    """What a holder must know of the model whose KV it holds."""

    fingerprint: bytes
    scale: float  # of scores
    windows: tuple[int | None, ...]  # by layer: sliding window in tokens


class Holder(SegmentTable):
    """The table of the segments in this memory. Operations on blocks pin their segments, so that blocks
    released meanwhile are given to nobody until the operation has ended. Thread-safe."""

    def __init__(
        self,
        memory: BlockMemory,
        allocator: BlockAllocator,
        model: HeldModel,
        *,
        instance_id: str,
        lend_blocks_max: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        epoch: int | None = None,
    ) -> None:
        """The others as at SegmentTable."""
        super().__init__(
            allocator, instance_id=instance_id, lend_blocks_max=lend_blocks_max, clock=clock, epoch=epoch
        )
        self.memory = memory
        self.model = model

    def check_model(self, fingerprint: bytes) -> None:
        if fingerprint != self.model.fingerprint:
            raise InvalidInput(
                f"this holder has KV of model {self.model.fingerprint.hex()[:12]}, not "
                f"{fingerprint.hex()[:12]}: start all services with one model, dtype and block size",
                param="model",
            )
