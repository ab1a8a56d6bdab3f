from __future__ import annotations

from kvcommons.backend.memory import BlockMemory
from kvcommons.holder.holder import HeldModel, Holder
from kvcommons.rblock.allocator import BlockAllocator
from kvcommons.rblock.layout import Layout


def test_heartbeats_tell_what_is_lent_and_not_what_is_the_holders_own() -> None:
    layout = Layout(layers=1, kv_heads=1, block_tokens=4, head_dim=4, query_heads=1, kv_dtype="float32")
    allocator = BlockAllocator(8)
    model = HeldModel(fingerprint=b"m", scale=1.0, windows=(None,))
    holder = Holder(BlockMemory(layout, 8), allocator, model, instance_id="mine", clock=lambda: 0.0)
    first = holder.lend("a", "s", 2, first_position=0, lease_s=9.0)
    holder.lend("a", "t", 1, first_position=0, lease_s=9.0)
    holder.lend("b", "u", 3, first_position=0, lease_s=9.0)
    own = allocator.allocate(1)
    holder.own("v", own)
    assert holder.loans() == {"a": 3, "b": 3}
    # Blocks that a settlement has brought home are lent no more.
    holder.freeze(first, 1, 1, owner="a")
    assert holder.loans() == {"a": 3, "b": 3}
    holder.trim(type(first)(handle=first.handle, epoch=first.epoch, generation=1), owner="a")
    assert holder.loans() == {"a": 2, "b": 3}
    holder.release([first])
    assert holder.loans() == {"a": 1, "b": 3}
