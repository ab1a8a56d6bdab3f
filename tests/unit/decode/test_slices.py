"""A slice that another replica computes is the slice that is computed here, to the bit; who asks for one that
cannot be is told why."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvcommons.engine.core import Core, make_core
from kvcommons.engine.fair_lock import FairLock
from kvcommons.errors import DeadlineExceeded, InvalidInput
from kvcommons.model.slices import Model, State
from kvcommons.model.spec import ModelSpec, model_info
from kvcommons.transport.client import DataClient
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.server import DataServer
from services.decode.staggering.peers import PeerHealth
from services.decode.staggering.slice_exchange import PendingSlice, SliceServer, begin_slice
from tests.machine import scaled

IDENTITY = bytes(range(32))
ROWS = 5


@dataclass
class Count:
    slices: int = 0

    def for_peer(self) -> None:
        self.slices += 1


@dataclass
class Pair:
    """A replica that serves, and a client of it with the same model."""

    core: Core
    turn: FairLock
    server: DataServer
    client: DataClient
    count: Count
    positions: list[int] = field(default_factory=lambda: [3, 0, 41, 7, 100])

    def state(self) -> tuple[State, Tensor]:
        """Of layer 0, and its attention."""
        model = self.core.model
        torch.manual_seed(0)
        state = model.begin(torch.arange(ROWS), torch.tensor(self.positions))
        return state, torch.randn(ROWS, model.spec.query_heads, model.spec.head_dim)

    def ask(
        self, layer: int = 0, *, identity: bytes = IDENTITY, unrotated: bool = False, wait_s: float = 10.0
    ) -> PendingSlice:
        state, attention = self.state()
        return begin_slice(
            self.client,
            self.core.model,
            identity,
            layer,
            state,
            attention,
            positions=self.positions,
            unrotated=unrotated,
            deadline=Deadline.after(wait_s),
        )


@pytest.fixture(params=["float32", "bfloat16"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    spec = ModelSpec.of(
        {
            "model_type": "qwen3", "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96,
            "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
            "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
        }
    )  # fmt: skip
    model = Model.random(spec, seed=1, init_range=0.08, dtype=request.param)
    info = model_info("random", spec, IDENTITY, request.param, 16)
    core, turn, count = make_core(model, info, capacity_tokens=64), FairLock(), Count()
    slices = SliceServer(core, turn, count)
    address = f"unix:{tmp_path}/slices"
    server = DataServer(
        address, lambda asked, exchange: slices.answer(asked.compute_slice, exchange), name="s"
    )
    server.start()
    client = DataClient(server.address)
    with torch.inference_mode():
        yield Pair(core, turn, server, client, count)
    client.close()
    assert server.stop()


@pytest.mark.parametrize("unrotated", [False, True])
def test_it_is_the_slice_to_the_bit(pair: Pair, unrotated: bool) -> None:
    state, attention = pair.state()
    expected = pair.core.model.advance(0, state, attention)
    for _ in range(2):  # the second one finds its rotation made
        answer, reported = pair.ask(unrotated=unrotated).finish()
        for name in ("hidden", "q", "k", "v", "cos", "sin", "positions"):
            assert torch.equal(getattr(answer, name), getattr(expected, name)), name
        assert torch.equal(answer.unrotated_q, expected.unrotated_q) == unrotated
        assert reported.computed_us
    # And it is a state like any other: the next slice can be computed from it.
    again = pair.core.model.advance(1, answer, attention)
    assert torch.equal(again.q, pair.core.model.advance(1, expected, attention).q)
    assert pair.count.slices == 2


def test_what_is_no_slice_of_this_model_is_refused(pair: Pair) -> None:
    with pytest.raises(InvalidInput, match="one model only"):
        pair.ask(identity=bytes(32)).finish()
    with pytest.raises(InvalidInput, match="no slice"):
        pair.ask(layer=2).finish()  # the last layer's end stays at home
    pair.positions.append(9)
    with pytest.raises(InvalidInput, match="bytes where"):
        begin_slice(
            pair.client, pair.core.model, IDENTITY, 0, *_short(pair), positions=pair.positions,
            unrotated=False, deadline=Deadline.after(10.0),
        ).finish()  # fmt: skip
    assert not pair.count.slices


def _short(pair: Pair) -> tuple[State, Tensor]:
    """A row less than there are positions."""
    state = pair.core.model.begin(torch.arange(ROWS), torch.arange(ROWS))
    return state, torch.zeros(ROWS, pair.core.model.spec.query_heads, pair.core.model.spec.head_dim)


def test_it_waits_for_its_turn_no_longer_than_it_may(pair: Pair) -> None:
    with pair.turn.within(Deadline.after(1)), pytest.raises(DeadlineExceeded):
        pair.ask(wait_s=0.1).finish()
    _, reported = pair.ask().finish()  # who gave up has left the queue
    assert reported.queued_us < 10e6


def test_a_turn_is_first_come_first_served() -> None:
    turn, order = FairLock(), list[int]()
    may_end = threading.Event()

    def take(number: int) -> None:
        with turn.within(Deadline.after(scaled(10))):
            if number == 0:
                may_end.wait(scaled(10))
            order.append(number)

    def asked(numbers: int) -> bool:
        return turn._queue._running and len(turn._queue._waiting) == numbers - 1

    with ThreadPoolExecutor(5) as threads:
        for number in range(5):
            threads.submit(take, number)
            deadline = Deadline.after(scaled(10))
            while not asked(number + 1):
                deadline.check()
                time.sleep(0.002)
        may_end.set()
    assert order == list(range(5))


def test_many_that_wait_and_give_up_leave_nobody_out() -> None:
    """Granted in the moment in which it gives up, a turn is passed on."""
    turn, served = FairLock(), list[int]()

    def take(number: int) -> None:
        try:
            with turn.within(Deadline.after(0.0005 * (number % 4))):
                time.sleep(0.0004)
                served.append(number)
        except DeadlineExceeded:
            pass

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(take, range(400)))
    with turn.within(Deadline.after(1)):
        assert served


def test_a_peer_that_fails_is_left_alone_longer_each_time() -> None:
    health = PeerHealth()
    assert not health.well(0.0)  # not met
    health.met(0.0)
    assert health.well(0.0)
    now_s, outs = 0.0, list[float]()
    for _ in range(8):
        health.failed(now_s)
        health.failed(now_s)  # of the other batch, at the same time
        began_s = now_s
        while not health.well(now_s):
            now_s += 0.5
            health.met(now_s)
        outs.append(now_s - began_s)
    assert outs == [1, 2, 4, 8, 16, 32, 60, 60]
    health.met(now_s + 61)
    health.failed(now_s + 61)
    assert not health.well(now_s + 61.9)
    assert not health.well(now_s + 62)  # it has to be met again, too
    health.met(now_s + 62)
    assert health.well(now_s + 62)
    health.missed()
    assert not health.well(now_s + 62)
