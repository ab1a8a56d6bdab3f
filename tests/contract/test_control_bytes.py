"""What is sent beside tensors does not grow with the context: sequence state lies with the holders, and only
changes are sent (Mnemosyne, section 5)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kvcommons.backend.choice import choose
from kvcommons.backend.memory import BlockMemory
from kvcommons.holder.attend_call import begin_attend
from kvcommons.holder.data import HolderData
from kvcommons.holder.exchange import Recipient
from kvcommons.holder.holder import HeldModel, Holder
from kvcommons.holder.layer_head import LayerHead
from kvcommons.holder.plan import PlanRow
from kvcommons.holder.plan_connection import PlanConnection, PlanPool
from kvcommons.holder.segments import SegmentRef
from kvcommons.pb import data_pb2
from kvcommons.prefill.spread import Holders
from kvcommons.prefill.targets import Target
from kvcommons.rblock.allocator import BlockAllocator
from kvcommons.rblock.layout import Layout
from kvcommons.transport.client import DataClient
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.server import DataServer
from tests.machine import scaled

SIZE, CHUNK, LAYERS = 256, 8, 1
LAYOUT = Layout(layers=LAYERS, kv_heads=1, block_tokens=SIZE, head_dim=8, kv_dtype="float32", query_heads=2)
CONTEXTS = (1 << 10, 1 << 14, 1 << 18, 1 << 20)
BACKEND = choose()
# Numbers take a byte for each seven bits: of those that grow with the context a message has three.
NUMBERS = 3 * 2


@dataclass(slots=True)
class Sent:
    """Bytes of plans, and how many messages they were."""

    size: int = 0
    messages: int = 0

    def taken(self) -> tuple[int, int]:
        size, messages = self.size, self.messages
        self.size = self.messages = 0
        return size, messages


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    counted, tell = Sent(), PlanConnection._tell

    def counting(self: PlanConnection, request: data_pb2.DataRequest, deadline: Deadline) -> None:
        tell(self, request, deadline)
        counted.size += request.ByteSize()
        counted.messages += 1

    monkeypatch.setattr(PlanConnection, "_tell", counting)
    return counted


@contextmanager
def holder(folder: Path, tokens: int) -> Iterator[tuple[Holder, str]]:
    """One with room for so many tokens, and its data address."""
    blocks = tokens // SIZE
    memory = BlockMemory(LAYOUT, blocks)
    memory.tensor.zero_()
    model = HeldModel(fingerprint=b"f" * 32, scale=0.25, windows=(None,) * LAYERS)
    held = Holder(memory, BlockAllocator(blocks), model, instance_id="holder")
    data = HolderData(held)
    server = DataServer(f"unix:{folder}/data", data, name="holder", session=data.attention.session)
    server.start()
    try:
        yield held, server.address
    finally:
        assert server.stop(scaled(5))


def lend(held: Holder, address: str, first_block: int, blocks: int) -> Target:
    ref = held.lend("debtor", "s", blocks, first_position=first_block * SIZE, lease_s=600)
    return Target(
        data_address=address, handle=ref.handle, epoch=ref.epoch, first_block=first_block, blocks=blocks
    )


@pytest.mark.parametrize("contexts", [CONTEXTS[:3], pytest.param(CONTEXTS, marks=pytest.mark.slow)])
def test_a_chunk_tells_holders_as_much_however_long_the_context(
    socket_folder: Path, sent: Sent, contexts: tuple[int, ...]
) -> None:
    """Three holders are full, a fourth takes tokens, and a fifth joins. Full ones are told nothing."""
    reported: dict[int, list[tuple[int, int]]] = {}
    with holder(socket_folder, 2 * contexts[-1]) as (held, address):
        for context in contexts:
            share = context // 4 // SIZE
            targets = [lend(held, address, number * share, share) for number in range(4)]
            holders = Holders(LAYOUT, BACKEND, attend_deadline_s=scaled(20.0))
            reported[context] = []
            for number in range(6):
                if number == 4:
                    targets.append(lend(held, address, 4 * share, 1))
                before = context + (number - 4 + (number >= 4)) * CHUNK
                for layer in range(LAYERS):
                    q = torch.ones(CHUNK, LAYOUT.query_heads, LAYOUT.head_dim)
                    for call in holders.ask(tuple(targets), SIZE, layer, range(before), q, position=before):
                        partial, _ = call.finish()
                        assert partial.lse.isfinite().all()
                reported[context].append(sent.taken())
            holders.close()
            held.release([SegmentRef(handle=one.handle, epoch=one.epoch) for one in targets])
    least = reported[contexts[0]]
    for context, counted in reported.items():
        for (size, messages), (least_size, least_messages) in zip(counted, least, strict=True):
            assert messages == least_messages
            assert least_size <= size <= least_size + NUMBERS * messages, f"context {context}: {counted}"
    assert [messages for _, messages in least] == [4, 1, 1, 1, 2, 1]


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_token_tells_its_holder_nothing_but_layers(socket_folder: Path, sent: Sent, context: int) -> None:
    """Of a sequence that generates: the plan moves a step on with each iteration, in heads of one size."""
    with holder(socket_folder, 2 * context) as (held, address):
        one = lend(held, address, 0, context // SIZE + 1)
        ref = SegmentRef(handle=one.handle, epoch=one.epoch)
        plans = PlanPool(DataClient(address))
        for token in range(5):
            row = PlanRow.of(ref, position=context + token, length=context + token + 1, append=True)
            for layer in range(LAYERS):
                q = torch.ones(1, LAYOUT.query_heads, LAYOUT.head_dim)
                kv = torch.zeros(1, 2, LAYOUT.kv_heads, LAYOUT.head_dim)
                call = begin_attend(
                    LAYOUT, BACKEND, [Recipient(plans=plans, rows=[row])], layer, q, kv, Deadline.after(20)
                )
                call.finish()
            size, messages = sent.taken()
            assert messages == (token == 0)
            assert size < 100
        plans.close()
        held.release([ref])
    heads = {len(LayerHead(0, 1, 0, step, 2000, 1, 1).pack()) for step in (0, context)}
    assert len(heads) == 1
