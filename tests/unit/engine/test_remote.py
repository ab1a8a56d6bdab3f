"""What an iteration is told of holders, and that nothing asked for is left behind when it fails."""

from __future__ import annotations

import time
from collections.abc import Sequence as Sequence_
from typing import TYPE_CHECKING, cast

import pytest
import torch

from kvcommons.backend.choice import choose
from kvcommons.engine.batch import Batch, Queries
from kvcommons.engine.core import Core
from kvcommons.engine.iteration import Iteration
from kvcommons.engine.iteration_timing import IterationTiming
from kvcommons.engine.remote.attention import RemoteAttention
from kvcommons.engine.remote.plans import NewRows
from kvcommons.engine.request import Request
from kvcommons.engine.sequence import LocalRun, RemoteRun, Run, Sequence
from kvcommons.engine.token_rows import TokenRows
from kvcommons.holder.budget import AttentionBudget
from kvcommons.holder.exchange import Recipient
from kvcommons.holder.head_group import Creditor
from kvcommons.holder.layer_head import LayerReply
from kvcommons.holder.plan import PlanRow
from kvcommons.holder.plan_connection import PlanConnection, PlanPool
from kvcommons.holder.segments import SegmentRef
from kvcommons.model.sampling import SamplingParams
from kvcommons.rblock.identity import IdentityChain
from kvcommons.transport.client import DataClient
from kvcommons.transport.deadline import Deadline
from services.decode.staggering.mini_batches import MiniBatches
from tests.unit.engine.tiny import tiny_core

if TYPE_CHECKING:
    from typing_extensions import Buffer

BLOCK, ROWS, LAYERS = 4, 4, 2
ANSWER_S = 2e-3
CPU = choose()


class Plan(PlanConnection):
    """At a holder that answers each layer after a while, without a wire in between."""

    def __init__(self, far: Far) -> None:
        super().__init__(DataClient("unix:/nowhere"))
        self.far = far
        self.under_way = False

    def prepare(self, rows: object, deadline: Deadline) -> None:
        """Nobody hears of it."""

    def advance(self, steps: int, deadline: Deadline) -> None:
        self.step += steps

    def send(self, layer: int, queries: int, appended: int, payload: object, deadline: Deadline) -> None:
        if self.far.asked == self.far.able:
            raise MemoryError("no more")
        self.far.asked += 1
        self.under_way = True

    def receive(self, layer: int, into: Sequence_[Buffer], deadline: Deadline) -> LayerReply:
        time.sleep(ANSWER_S)
        self.under_way = False
        for buffer in into:
            memoryview(buffer)[:] = bytes(memoryview(buffer).nbytes)
        return LayerReply(layer, 1, self.step, queued_us=0, computed_us=100, lost=0)

    def drop(self) -> None:
        self.far.dropped += self.under_way
        self.under_way = False


class Far(PlanPool):
    """A holder that can be asked `able` times."""

    def __init__(self, able: int = 1000) -> None:
        super().__init__(DataClient("unix:/nowhere"))
        self.able = able
        self.asked = self.dropped = 0
        self.data_address = "far"

    def take(self, rows: object, preferred: PlanConnection | None = None) -> PlanConnection:
        return preferred or Plan(self)

    def waited(self, seconds: float, answered: bool) -> None:
        """Nobody asks."""

    def recipients(self, rows: Sequence_[PlanRow]) -> list[Recipient]:
        return [Recipient(plans=self, rows=rows)]


@pytest.fixture(scope="module")
def core() -> Core:
    return tiny_core(layers=LAYERS, block_tokens=BLOCK)


def batch(holders: list[Far], *, here: bool = False) -> Batch:
    """Each row has two blocks on one of the holders, the second half filled; `here`: one more in front."""
    sequences = []
    for row in range(ROWS):
        first = int(here)
        runs: list[Run] = [LocalRun(first_block=0, blocks=[row])] if here else []
        runs.append(
            RemoteRun(
                first_block=first, count=2, holder=cast(Creditor, holders[row % len(holders)]),
                ref=SegmentRef(handle=row + 1, epoch=1),
            )
        )  # fmt: skip
        tokens = (first + 1) * BLOCK + 2
        request = Request(
            request_id="r", session_id="", tenant="t", salt=bytes(32), tokens=tuple(range(tokens - 1)),
            prompt_tokens=tokens - 1, max_position=100,
            sampling=SamplingParams(),
            stop_token_ids=frozenset(), store_control="", store_data="", matched_blocks=0, no_reuse=False,
        )  # fmt: skip
        chain = IdentityChain(bytes(32), bytes(32), BLOCK)
        sequence = Sequence(key=row, request=request, block_tokens=BLOCK, chain=chain)
        for run in runs:
            sequence.append_run(run)
        sequence.start(tokens - 1)
        sequences.append(sequence)
    return Batch(sequences, BLOCK, CPU)


def remote(core: Core, mini_batches: int) -> RemoteAttention:
    return RemoteAttention(core.layout, CPU, AttentionBudget(1.0), MiniBatches(mini_batches))


def new_rows(core: Core) -> NewRows:
    layout = core.layout
    kv = torch.zeros(ROWS, layout.kv_heads, layout.head_dim)
    return NewRows(0, Queries(plain=torch.zeros(ROWS, layout.query_heads, layout.head_dim)), kv, kv)


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_each_layer_asks_each_holder_and_waits_for_all_of_it(core: Core, mini_batches: int) -> None:
    """In one message or two."""
    holders, timing = [Far(), Far()], IterationTiming()
    attention, rows = remote(core, mini_batches), new_rows(core)
    step = attention.begin(batch(holders), 5.0, timing)
    for _ in range(LAYERS):
        attention.ask(step, rows)
        attention.collect(step, rows)
    attention.end(step)
    assert [holder.asked for holder in holders] == [LAYERS * mini_batches] * 2
    waited_s = timing.there_s + timing.network_s + timing.waiting_s
    assert waited_s >= LAYERS * mini_batches * ANSWER_S


def test_what_was_asked_for_is_dropped_where_asking_fails(core: Core) -> None:
    holder = Far(able=2)
    attention = remote(core, 4)
    step = attention.begin(batch([holder]), 5.0, IterationTiming())
    with pytest.raises(MemoryError):
        attention.ask(step, new_rows(core))
    attention.end(step)
    assert holder.dropped == 2


@pytest.mark.parametrize("fails", ["attention", "answer"])
def test_what_was_asked_for_is_dropped_where_the_iteration_fails(
    core: Core, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is out at any time between asking and the last answer."""
    holder = Far()

    def out_of_memory(*of: object) -> None:
        raise MemoryError(fails)

    if fails == "attention":
        monkeypatch.setattr(TokenRows, "_attend_here", out_of_memory)
    else:
        monkeypatch.setattr(Plan, "receive", out_of_memory)
    rows = TokenRows(core, remote(core, 2), batch([holder], here=True), 5.0)
    iteration = Iteration(core, [rows])
    with torch.inference_mode():
        assert iteration.run() == [[]]
    assert isinstance(iteration.failures[0], MemoryError)
    assert str(iteration.failures[0]) == fails
    assert holder.dropped == 2
