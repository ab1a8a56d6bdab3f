"""What an engine does between two layers of a chunk that takes long, by the test's clock half a second a
layer."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvcommons.attention.native import library
from kvcommons.blockstore.saver import BlockSaver
from kvcommons.engine.callbacks import SequenceUpdate
from kvcommons.engine.core import Core
from kvcommons.engine.core_lock import CoreLock
from kvcommons.engine.engine import Engine
from kvcommons.engine.history import Histories
from kvcommons.engine.iteration_timing import IterationTiming
from kvcommons.engine.keeper import BlockKeeper
from kvcommons.engine.load_or_compute import AlwaysLoad
from kvcommons.engine.prompt import Prompt
from kvcommons.engine.prompt_memory import WholePrompt
from kvcommons.engine.prompts import Prompts
from kvcommons.engine.read_buffer import ReadBuffer
from kvcommons.engine.request import Request
from kvcommons.engine.scheduler import Scheduler
from kvcommons.engine.sequence import LocalRun, RemoteRun, Sequence
from kvcommons.errors import Internal, InvalidInput
from kvcommons.holder.allowance import new_allowance
from kvcommons.holder.budget import AttentionBudget
from kvcommons.holder.data import HolderData
from kvcommons.holder.holder import HeldModel, Holder
from kvcommons.holder.segments import SegmentRef
from kvcommons.model.sampling import SamplingParams
from kvcommons.pb import common_pb2
from kvcommons.telemetry.trace import Tracer
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.server import DataServer
from services.decode.batching.engine import decode_engine
from services.decode.config import DecodeConfig
from tests.clock import Clock
from tests.contract.engine_drafts import foreseen
from tests.contract.plan_cases import Peer, row
from tests.machine import scaled
from tests.unit.engine.loads import HeldLoader
from tests.unit.engine.sinks import RecordingSink
from tests.unit.engine.tiny import tiny_core
from tests.waiting import wait_until

pytest_plugins = ("tests.contract.engine_fixtures",)

LAYERS = 8
LAYER_S = 0.5
LONG_S = scaled(20.0)
PROMPT = [7 * i % 97 + 1 for i in range(40)]


class Chunk(RecordingSink):
    """`pace` is called within each layer, on the engine's thread."""

    def __init__(self, pace: Callable[[int], None]) -> None:
        super().__init__()
        self._pace = pace

    def computed(self, prompt: Prompt, layer: int, blocks: range) -> None:
        super().computed(prompt, layer, blocks)
        self._pace(layer)


@dataclass(slots=True)
class Around:
    """What surrounds the engine."""

    updates: list[SequenceUpdate] = field(default_factory=list)
    given_back: list[RemoteRun] = field(default_factory=list)
    delivered: Callable[[], None] = lambda: None  # called after each delivery, on the engine's thread

    def deliver(self, steps: list[SequenceUpdate]) -> None:
        self.updates += steps
        self.delivered()

    def borrow(self, sequence: Sequence) -> None:
        raise AssertionError("there is room")

    def give_back(self, runs: list[RemoteRun]) -> None:
        self.given_back += runs

    def save_remote(self, run: RemoteRun, sequence: Sequence, index: int) -> None:
        raise AssertionError("nothing is saved")

    def iteration(self, batch: int, timing: IterationTiming) -> None:
        """Nobody counts."""

    def verified(self, drafted: int, accepted: int) -> None:
        """Nobody counts."""

    def ended(self, step: SequenceUpdate) -> None:
        """Nobody counts."""


class Creditor:
    """A decode engine that computes prompts, its holder, and a budget with the test's clock."""

    def __init__(
        self, core: Core, engine: Engine, prompts: Prompts, budget: AttentionBudget, around: Around
    ) -> None:
        self.core = core
        self.engine = engine
        self.around = around
        self.budget = budget
        self._prompts = prompts

    def submit(self, sink: Chunk, tokens: list[int] = PROMPT, *, stored_blocks: int = 0) -> int:
        key, now_s = self.engine.new_key(), time.monotonic()
        self.engine.submit(
            Prompt(
                sequence=self.sequence(key, tokens, stored_blocks=stored_blocks), sink=sink,
                memory=WholePrompt(self.core, self._prompts), deadline_s=now_s + LONG_S, submitted_s=now_s,
            )
        )  # fmt: skip
        return key

    def sequence(
        self, key: int, tokens: list[int], *, stored_blocks: int = 0, max_position: int = 16
    ) -> Sequence:
        """`stored_blocks`: leading ones that a store is said to have."""
        request = Request(
            request_id="r", session_id="", tenant="t", salt=bytes(32), tokens=tuple(tokens),
            prompt_tokens=len(tokens), sampling=SamplingParams(), store_control="",
            store_data="unix:/store" if stored_blocks else "", matched_blocks=stored_blocks, no_reuse=False,
            max_position=max_position,
        )  # fmt: skip
        return Sequence(
            key=key, request=request, block_tokens=self.core.block_tokens, chain=request.chain(self.core.info)
        )


@contextmanager
def creditor(
    clock: Clock,
    tbt_s: float = 0.2,
    core_lock: CoreLock | None = None,
    max_draft_tokens: int = 0,
    *,
    chunk_tokens: int = len(PROMPT),
    chunks_s: float | None = None,
    loader: HeldLoader | None = None,
) -> Iterator[Creditor]:
    """Not started yet. `chunks_s`: what bounds the length of chunks, instead of `tbt_s`. What `loader` loads
    is waited for, however long it takes."""
    core, around = tiny_core(layers=LAYERS), Around()
    cost = AlwaysLoad(lambda _: 0.0) if loader else None
    loader = loader or HeldLoader()
    saver = BlockSaver("engine", buffer_bytes=1 << 20)
    keeper = BlockKeeper(core, saver)
    scheduler = Scheduler(max_batch=4, max_queue=4, max_prompts=4)
    prompts = Prompts(
        core, scheduler, chunk_tokens=chunk_tokens, keeper=keeper,
        histories=Histories(core, loader), read_buffer=ReadBuffer(layers=LAYERS, bytes_max=0),
        cost=cost, tracer=Tracer.off(), tbt_objective_s=tbt_s if chunks_s is None else chunks_s,
        core_lock=core_lock,
    )  # fmt: skip
    budget = AttentionBudget(tbt_s, new_allowance(core.backend.attention.native_exchange), clock)
    engine = decode_engine(
        core, scheduler=scheduler, may_borrow=False, attend_deadline_s=LONG_S, budget=budget,
        keeper=keeper, callbacks=around, metrics=around, prompts=prompts, core_lock=core_lock,
        max_draft_tokens=max_draft_tokens,
    )  # fmt: skip
    try:
        yield Creditor(core, engine, prompts, budget, around)
    finally:
        engine.stop(LONG_S)
        keeper.close()
        saver.close(Deadline.after(0))
        loader.close()
    assert core.allocator.free == core.allocator.total, "no block is left with anybody"


@pytest.mark.skipif(library.chosen() is None, reason="there is no compiled kernel")
def test_a_debtor_gets_its_partials_while_its_creditor_computes_a_chunk(socket_folder: Path) -> None:
    """Not one for each of the creditor's iterations: this one takes longer than a layer's deadline."""
    deadline_s = next(
        one.default for one in DecodeConfig.__dataclass_fields__.values() if one.name == "attend_deadline_s"
    )
    assert deadline_s < LAYERS * LAYER_S
    clock, answered_s = Clock(), list[float]()
    with creditor(clock, tbt_s=1e-6) as made:  # so little that each partial uses up what has come in
        core, model = made.core, made.core.model
        windows = tuple(model.window(layer) for layer in range(LAYERS))
        held = HeldModel(fingerprint=core.info.fingerprint, scale=model.scale, windows=windows)
        holder = Holder(core.memory, core.allocator, held, instance_id="creditor")
        data = HolderData(holder, budget=made.budget)
        server = DataServer(
            f"unix:{socket_folder}/data", data, name="creditor", session=data.attention.session
        )
        server.start()
        peer = Peer(server.address, core.layout)
        lent = holder.lend("debtor", "s", 1, first_position=0, lease_s=LONG_S)
        peer.open([row(lent)])
        made.budget.iterated(1.0)  # an own iteration has ended: others are bounded
        peer.ask(peer.layer(0))

        def pace(layer: int) -> None:
            clock.now_s += LAYER_S
            wait_until(lambda: len(answered_s) >= layer)

        def debtor() -> None:
            for layer in range(LAYERS):
                asked_s = clock.now_s
                peer.ask(peer.layer(layer, step=1))
                answered_s.append(clock.now_s - asked_s)

        asks = threading.Thread(target=debtor)
        asks.start()
        chunk = Chunk(pace)
        made.submit(chunk)
        made.engine.start()
        assert chunk.ended.wait(LONG_S)
        assert chunk.first is not None, chunk.error
        asks.join(LONG_S)
        assert len(answered_s) == LAYERS
        assert max(answered_s) <= deadline_s
        peer.socket.close()
        assert server.stop(LONG_S)
        holder.release([lent])


def alone() -> tuple[int, list[int]]:
    """The prompt's token, and its layers."""
    with creditor(Clock()) as made:
        chunk = Chunk(lambda layer: None)
        made.submit(chunk)
        made.engine.start()
        assert chunk.ended.wait(LONG_S)
        assert chunk.first is not None, chunk.error
        return chunk.first.token.token, chunk.layers


def test_a_prompt_is_cancelled_between_two_layers_of_its_chunk() -> None:
    with creditor(Clock()) as made:

        def pace(layer: int) -> None:
            if layer == 2:
                made.engine.cancel(key)

        chunk = Chunk(pace)
        key = made.submit(chunk)
        made.engine.start()
        assert chunk.ended.wait(LONG_S)
        wait_until(lambda: made.core.allocator.in_use == 0)
    assert chunk.layers == [0, 1, 2]
    assert chunk.first is None


def test_of_two_prompts_in_one_iteration_the_other_goes_on() -> None:
    short = PROMPT[:7]
    expected = []
    for prompts in ([short], [short, PROMPT[:9]]):
        with creditor(Clock()) as made:
            keys = list[int]()

            def pace(layer: int, made: Creditor = made, keys: list[int] = keys) -> None:
                if layer == 2 and len(keys) > 1:
                    made.engine.cancel(keys[1])

            chunks = [Chunk(pace) for _ in prompts]
            keys += [made.submit(chunk, one) for chunk, one in zip(chunks, prompts, strict=True)]
            made.engine.start()
            for chunk in chunks:
                assert chunk.ended.wait(LONG_S)
            assert chunks[0].first is not None
            expected.append(chunks[0].first.token.token)
            assert chunks[-1].layers == list(range(3 if len(prompts) > 1 else LAYERS))
    assert expected[0] == expected[1]


def test_what_is_asked_about_other_sequences_is_answered_between_two_layers() -> None:
    """A move of borrowed KV: what could move is asked for, and the sequence switches to the copies."""
    with creditor(Clock()) as made:
        core, engine = made.core, made.engine
        sequence = made.sequence(engine.new_key(), PROMPT[:33])
        sequence.computed = 33
        lender: Any = object()
        ref = SegmentRef(handle=1, epoch=1)
        sequence.append_run(RemoteRun(first_block=0, count=3, holder=lender, ref=ref))
        engine.add(sequence)
        answers: dict[str, Future[Any]] = {}
        copies = core.allocator.allocate(1)

        def pace(layer: int) -> None:
            if layer == 1:
                answers["survey"] = engine.survey(lender)
            elif layer == 2:
                (move,) = answers["survey"].result(0)
                moved = LocalRun(first_block=0, blocks=copies)
                answers["switch"] = engine.switch(move, moved, SegmentRef(handle=1, epoch=1, generation=1))
            elif layer == 3:
                assert answers["switch"].result(0) is not None
                assert sequence.local_blocks() == copies
                engine.cancel(sequence.key)
            elif layer == 4:
                assert made.around.given_back == sequence.remote_runs()

        chunk = Chunk(pace)
        made.submit(chunk)
        engine.start()
        assert chunk.ended.wait(LONG_S)
    assert chunk.first is not None, chunk.error
    assert (chunk.first.token.token, chunk.layers) == alone()


def test_a_sequence_that_generates_beside_a_chunk_keeps_its_blocks_until_the_iteration_ends() -> None:
    with creditor(Clock()) as made:
        core, engine = made.core, made.engine
        sequence = generating(made)
        engine.begin(sequence.key, common_pb2.SampledToken(token=3))
        in_use = list[int]()

        def pace(layer: int) -> None:
            in_use.append(core.allocator.in_use)
            if len(in_use) == 2:
                engine.cancel(sequence.key)

        chunk = Chunk(pace)
        made.submit(chunk)
        engine.start()
        assert chunk.ended.wait(LONG_S)
    assert chunk.first is not None, chunk.error
    assert len(in_use) > LAYERS, "the first chunk was short, for the sequence's sake"
    assert in_use == [4] * LAYERS + [3] * (len(in_use) - LAYERS)
    assert chunk.first.token.token == alone()[0]


def generating(made: Creditor, tokens: int = 5, *, max_position: int = 16) -> Sequence:
    """A sequence whose prompt's KV is all zeros, about to begin."""
    made.core.memory.tensor.zero_()
    sequence = made.sequence(made.engine.new_key(), PROMPT[:tokens], max_position=max_position)
    sequence.computed = tokens
    sequence.append_run(LocalRun(first_block=0, blocks=made.core.allocator.allocate(1)))
    made.engine.add(sequence)
    return sequence


@pytest.mark.usefixtures("all_drafts")
@pytest.mark.parametrize(
    ("drafts", "at_layers"), [(0, [0, 0, *range(2, LAYERS)]), (3, [0, 0, 5, 9, 11, 11, 11, 11])]
)
def test_a_sequence_that_begins_while_a_chunk_is_computed_generates_between_its_layers(
    drafts: int, at_layers: list[int]
) -> None:
    first = common_pb2.SampledToken(token=3)
    with creditor(Clock()) as made:
        sequence = generating(made)
        made.engine.begin(sequence.key, first)
        made.engine.start()
        wait_until(lambda: made.around.updates and made.around.updates[-1].reason == "length")
        expected = list(sequence.tokens)
    with creditor(Clock(), max_draft_tokens=drafts) as made, foreseen([expected], wrong=0.0, most=drafts):
        sequence = generating(made)
        delivered = list[int]()

        def pace(layer: int) -> None:
            delivered.append(sum(len(update.tokens) for update in made.around.updates))
            if layer == 1:
                made.engine.begin(sequence.key, first)

        chunk = Chunk(pace)
        made.submit(chunk)
        made.engine.start()
        assert chunk.ended.wait(LONG_S)
        assert chunk.first is not None, chunk.error
        wait_until(lambda: made.around.updates[-1].reason == "length")
        assert list(sequence.tokens) == expected
    assert delivered == at_layers
    assert (chunk.first.token.token, chunk.layers) == alone()


def test_a_command_that_fails_between_two_layers_drops_none_of_those_behind_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    answers = list[Future[Any]]()
    with creditor(Clock()) as made, caplog.at_level(logging.ERROR):

        def pace(layer: int) -> None:
            if layer == 1:
                made.engine.post(_fails)
                answers.append(made.engine.survey())

        chunk = Chunk(pace)
        made.submit(chunk)
        made.engine.start()
        assert chunk.ended.wait(LONG_S)
        assert answers[0].result(LONG_S) == []
        wait_until(lambda: made.core.allocator.in_use == 0)
    assert isinstance(chunk.error, Internal)
    assert chunk.layers == [0, 1]
    assert "the engine's loop failed" in caplog.text


def _fails() -> None:
    raise InvalidInput("as a mistake in the engine would")
