"""What `kvcommons bench fixed-time` measures: iterations of real engines, with a real attention pool.

An engine makes one token after another of a sequence, or computes one chunk after another of a prompt, whose
KV lies here or in a pool process. Layers see a window of few tokens and the model is tiny, so that attention
and products take next to nothing, and the same at any context. Blocks, tables, plans and messages are those
of the whole context: what grows with it is work that an iteration has for itself.

KV of the context is not computed: an iteration finds it where it would lie. Contexts take turns. What each
further sequence costs is seen of batches, with KV here.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from benchmarks.holders import CALL_S, HolderProcess, attention_pools, decoded
from benchmarks.store_cost import cpu_clock_s
from kvcommons.blockstore.loader import BlockLoader
from kvcommons.blockstore.saver import BlockSaver
from kvcommons.engine.callbacks import SequenceUpdate
from kvcommons.engine.core import Core, load_core
from kvcommons.engine.engine import Engine
from kvcommons.engine.history import Histories
from kvcommons.engine.iteration_timing import IterationTiming
from kvcommons.engine.keeper import BlockKeeper
from kvcommons.engine.prompt import FirstToken, Prompt, PromptMemory
from kvcommons.engine.prompt_engine import prompt_engine
from kvcommons.engine.prompt_memory import WholePrompt
from kvcommons.engine.prompts import Prompts
from kvcommons.engine.read_buffer import ReadBuffer
from kvcommons.engine.request import Request
from kvcommons.engine.scheduler import Scheduler
from kvcommons.engine.sequence import LocalRun, RemoteRun, Run, Sequence
from kvcommons.engine.settings import EngineSettings
from kvcommons.errors import DeadlineExceeded, KVCommonsError
from kvcommons.holder.budget import AttentionBudget
from kvcommons.model.sampling import SamplingParams
from kvcommons.model.synthetic import random_config, write_random_folder
from kvcommons.pb import common_pb2
from kvcommons.prefill.handover import HandOver
from kvcommons.prefill.push import Delivery, Pusher
from kvcommons.prefill.spread import Holders, SpreadPrompt
from kvcommons.prefill.targets import TargetTable
from kvcommons.rblock.identity import SALT_BYTES
from kvcommons.telemetry.trace import Tracer
from kvcommons.transport.deadline import Deadline
from services.decode.batching.engine import decode_engine

Progress = Callable[[str], None]
LAYERS, WINDOW = 2, 64
BLOCK_TOKENS = 64  # as many has a chunk
_UNCOUNTED = 8  # iterations at the beginning
BATCH_CONTEXT = 512


class Kind(Enum):
    """Of iterations: what is computed, and where the KV before it lies."""

    TOKEN_HERE = "token, KV here"
    TOKEN_AWAY = "token, KV on a holder"
    CHUNK_HERE = "chunk, KV here"
    CHUNK_AWAY = "chunk, KV on a holder"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    contexts: tuple[int, ...]
    sequences: tuple[int, ...]  # of batches
    tokens: int
    chunks: int
    rounds: int

    @property
    def capacity_tokens(self) -> int:
        """Of the engine, and of the pool."""
        more = max(self.tokens, self.chunks * BLOCK_TOKENS) + 2 * BLOCK_TOKENS
        batch = max(self.sequences, default=0) * (BATCH_CONTEXT + more)
        return max(max(self.contexts) + more, batch)


@dataclass(frozen=True, slots=True)
class Taken:
    """Seconds of an iteration: by the clock, and of the processors by each process."""

    wall_s: float
    engine_s: float
    holder_s: float


class Watch(ABC):
    """Looks between two iterations; the end is awaited."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._error: KVCommonsError | None = None

    @abstractmethod
    def look(self) -> None:
        """On the engine's thread."""

    def end(self, error: KVCommonsError | None = None) -> None:
        self._error = error
        self._over.set()

    def wait(self) -> None:
        """For the end. Raises what made it come early, DeadlineExceeded."""
        if not self._over.wait(CALL_S):
            raise DeadlineExceeded("iterations did not end in time")
        if self._error is not None:
            raise self._error


class Clocks(Watch):
    def __init__(self, holder_pid: int) -> None:
        super().__init__()
        self._pid = holder_pid
        self._read: list[Taken] = []

    def look(self) -> None:
        self._read.append(Taken(time.monotonic(), time.process_time(), cpu_clock_s(self._pid)))

    def taken(self) -> Taken:
        """Of an iteration, on average."""
        first, last = self._read[_UNCOUNTED], self._read[-1]
        count = len(self._read) - 1 - _UNCOUNTED
        return Taken(
            (last.wall_s - first.wall_s) / count,
            (last.engine_s - first.engine_s) / count,
            (last.holder_s - first.holder_s) / count,
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """Of each round."""

    kinds: dict[Kind, dict[int, list[Taken]]]  # by the context
    batches: dict[int, list[Taken]]  # by the number of sequences


async def measure(folder: Path, setting: Setting, progress: Progress) -> Measured:
    model = folder / "tiny"
    progress("loading the model")
    core = await asyncio.to_thread(tiny_core, model, setting.capacity_tokens)
    taken = {kind: {context: list[Taken]() for context in setting.contexts} for kind in Kind}
    async with attention_pools(
        folder, model, core, count=1, capacity_tokens=setting.capacity_tokens, transport="unix"
    ) as (pool,):
        for round_ in range(setting.rounds):
            for kind, by_context in taken.items():
                contexts = setting.contexts if round_ % 2 else setting.contexts[::-1]
                for context in contexts:
                    progress(f"{kind.value}, {context:,} tokens, round {round_ + 1} of {setting.rounds}")
                    by_context[context].append(await _iterations(core, pool, kind, context, setting))
    return Measured(taken, await asyncio.to_thread(_batches, core, setting, progress))


def _batches(core: Core, setting: Setting, progress: Progress) -> dict[int, list[Taken]]:
    taken = {count: list[Taken]() for count in setting.sequences}
    for round_ in range(setting.rounds):
        for count in setting.sequences[:: 1 if round_ % 2 else -1]:
            progress(f"{count} sequences, round {round_ + 1} of {setting.rounds}")
            watch, end = Clocks(os.getpid()), BATCH_CONTEXT + setting.tokens
            runs = [_room(core, BATCH_CONTEXT) for _ in range(count)]
            _generate(core, watch, runs, BATCH_CONTEXT, end)
            core.allocator.forget_cached()
            taken[count].append(watch.taken())
    return taken


def _room(core: Core, context: int) -> LocalRun:
    return LocalRun(first_block=0, blocks=core.allocator.allocate(core.layout.blocks_of(context)))


def tiny_core(model: Path, capacity_tokens: int) -> Core:
    """Of a new model, in this folder. There is KV in all of its memory."""
    config = random_config("7m") | {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": WINDOW,
        "hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 1,
        "intermediate_size": 64, "vocab_size": 512, "max_position_embeddings": capacity_tokens,
    }  # fmt: skip
    write_random_folder(model, config)
    settings = EngineSettings(model=str(model), block_tokens=BLOCK_TOKENS, capacity_tokens=capacity_tokens)
    core = load_core(settings)
    core.memory.tensor.normal_()
    return core


async def _iterations(core: Core, pool: HolderProcess, kind: Kind, context: int, setting: Setting) -> Taken:
    """The holder has room for all tokens in any case: what chunks compute goes there."""
    holder, watch = pool.holder, Clocks(pool.process.pid)
    chunks = kind in (Kind.CHUNK_HERE, Kind.CHUNK_AWAY)
    end = context + (setting.chunks * BLOCK_TOKENS if chunks else setting.tokens)
    blocks = core.layout.blocks_of(end)
    ref = await holder.reserve("bench", blocks, first_position=0, timeout_s=CALL_S)
    try:
        away = RemoteRun(first_block=0, count=blocks, holder=holder, ref=ref)
        await asyncio.to_thread(_write_seen, core, away, context)
        await asyncio.to_thread(iterate, core, watch, kind, away, context, end)
        return watch.taken()
    finally:
        await holder.release([ref], timeout_s=CALL_S)
        core.allocator.forget_cached()


def _write_seen(core: Core, away: RemoteRun, context: int) -> None:
    """What the window shows of the context."""
    seen = range((context - WINDOW) // BLOCK_TOKENS, core.layout.blocks_of(context))
    for layer in range(LAYERS):
        objects = core.memory.read_buffers(layer, range(len(seen)))
        away.holder.write_blocks(away.ref, layer, seen.start, objects, Deadline.after(CALL_S))


@contextmanager
def _keeper(core: Core) -> Iterator[BlockKeeper]:
    """It is given nothing: there is no store."""
    saver = BlockSaver("bench", buffer_bytes=1 << 20)
    keeper = BlockKeeper(core, saver)
    try:
        yield keeper
    finally:
        keeper.close()
        saver.close(Deadline.after(0))


def iterate(core: Core, watch: Watch, kind: Kind, away: RemoteRun, context: int, end: int) -> None:
    """Of this kind, behind `context` tokens, until there are `end`. `away`: a holder's room for all."""
    if kind in (Kind.CHUNK_HERE, Kind.CHUNK_AWAY):
        _compute(core, watch, kind, away, context, end)
    else:
        run = _room(core, context) if kind is Kind.TOKEN_HERE else away
        _generate(core, watch, [run], context, end)


def _generate(core: Core, watch: Watch, runs: Items[Run], context: int, end: int) -> None:
    """Tokens of sequences that have `context` of them each, in these runs, until they have `end`. Here they
    grow block by block."""
    around = _Around(watch, len(runs))
    with _keeper(core) as keeper:
        engine = decode_engine(
            core, scheduler=Scheduler(max_batch=len(runs)), may_borrow=False, attend_deadline_s=CALL_S,
            budget=AttentionBudget(1.0), keeper=keeper, callbacks=around, metrics=around, pipelining="off",
        )  # fmt: skip
        for run in runs:
            key = engine.new_key()
            engine.add(decoded(core, key, context, end, [run], no_reuse=False))
            engine.begin(key, common_pb2.SampledToken(token=1))
        _run(engine, watch)


def _compute(core: Core, watch: Watch, kind: Kind, away: RemoteRun, context: int, end: int) -> None:
    """Chunks of a prompt of `end` tokens, from `context` on. They go to the holder, and where the KV before
    them lies there too, the engine has that of a chunk only."""
    delivery = Delivery(Deadline.after(CALL_S), "")
    pusher = Pusher(core.memory, core.allocator, call_deadline_s=CALL_S)
    holders = Holders(core.layout, core.backend, attend_deadline_s=CALL_S)
    loader, targets = BlockLoader(lambda _: None), TargetTable([away.place()])
    try:
        with _keeper(core) as keeper:
            scheduler = Scheduler(max_queue=1, max_prompts=1)
            prompts = Prompts(
                core, scheduler, chunk_tokens=BLOCK_TOKENS, keeper=keeper, histories=Histories(core, loader),
                read_buffer=ReadBuffer(layers=LAYERS, bytes_max=0), tracer=Tracer.off(),
            )  # fmt: skip
            engine = prompt_engine(core, scheduler, prompts, keeper)
            memory: PromptMemory = _Begun(core, prompts, context)
            if kind is Kind.CHUNK_AWAY:
                memory = SpreadPrompt(core, keeper, holders, delivery, targets, BLOCK_TOKENS)
            sink = _Sink(watch, pusher, delivery, targets, context // BLOCK_TOKENS)
            prompt = _prompt(core, engine.new_key(), end, memory, sink)
            if kind is Kind.CHUNK_AWAY:
                prompt.reuse(placed=context // BLOCK_TOKENS)
            engine.submit(prompt)
            _run(engine, watch)
            delivery.await_arrival()
    finally:
        pusher.stop()
        holders.close()
        loader.close()


def _run(engine: Engine, watch: Watch) -> None:
    gc.collect()  # Python goes over the tokens of a new sequence some times, but not in each iteration
    engine.start()
    try:
        watch.wait()
    finally:
        engine.stop(CALL_S)


def _prompt(core: Core, key: int, tokens: int, memory: PromptMemory, sink: HandOver) -> Prompt:
    """One that nobody has computed before."""
    request = Request(
        request_id=f"bench-{key}", session_id="", tenant="bench", salt=os.urandom(SALT_BYTES),
        tokens=(1,) * tokens, prompt_tokens=tokens, sampling=SamplingParams(), store_control="",
        store_data="", matched_blocks=0, no_reuse=False,
    )  # fmt: skip
    now_s = time.monotonic()
    return Prompt(
        sequence=Sequence(
            key=key, request=request, block_tokens=core.block_tokens, chain=request.chain(core.info)
        ),
        sink=sink, memory=memory, deadline_s=now_s + CALL_S, submitted_s=now_s,
    )  # fmt: skip


class _Begun(WholePrompt):
    """Of a prompt whose first tokens were computed before."""

    def __init__(self, core: Core, prompts: Prompts, tokens: int) -> None:
        super().__init__(core, prompts)
        self._tokens = tokens

    def take(self, prompt: Prompt) -> bool:
        taken = super().take(prompt)
        prompt.sequence.computed = self._tokens
        return taken


class _Sink(HandOver):
    """Looks in each chunk, and says when the prompt has ended: the pool is told of no sequence."""

    def __init__(
        self, watch: Watch, pusher: Pusher, delivery: Delivery, targets: TargetTable, push_from_block: int
    ) -> None:
        super().__init__(pusher, delivery, targets, push_from_block, lambda event: None)
        self._watch = watch

    def computed(self, prompt: Prompt, layer: int, blocks: range) -> None:
        if not layer:
            self._watch.look()
        super().computed(prompt, layer, blocks)

    def finished(self, prompt: Prompt, first: FirstToken) -> None:
        self._watch.end()

    def failed(self, error: KVCommonsError) -> None:
        self._watch.end(error)

    def refused(self, error: KVCommonsError) -> None:
        self._watch.end(error)


class _Around:
    """An engine's EngineCallbacks, and its metrics; of sequences that end together."""

    def __init__(self, watch: Watch, sequences: int) -> None:
        self._watch = watch
        self._sequences = sequences

    def deliver(self, steps: list[SequenceUpdate]) -> None:
        ended = [step for step in steps if step.reason or step.error is not None]
        self._sequences -= len(ended)
        if not self._sequences:
            self._watch.end(ended[0].error)
        elif not ended:
            self._watch.look()

    def borrow(self, sequence: Sequence) -> None:
        raise AssertionError("the holder has room for all tokens")

    def give_back(self, runs: list[RemoteRun]) -> None:
        """Who has reserved them releases them."""

    def save_remote(self, run: RemoteRun, sequence: Sequence, index: int) -> None:
        raise AssertionError("nothing is saved")

    def iteration(self, batch: int, timing: IterationTiming) -> None:
        """The clocks say more."""

    def verified(self, drafted: int, accepted: int) -> None:
        """Nothing is drafted."""

    def ended(self, step: SequenceUpdate) -> None:
        """It is delivered."""
