"""What does overlapping loads and saves with computing bring (AttentionStore, section 4.3.2, figures 19, 20)?

A real engine and a real kvstore, with a link between them whose speed is set so that loading the history
takes `load_share` times as long as computing the new tokens, and saving a prompt `save_share` of the time of
its round: the proportions of the paper's machine. On one whose memory is as fast as its processor is slow,
neither would be seen. A share of 0 leaves the link as quick as it is: what a GPU is asked with.

Loading: a job computes, and the one that is measured waits behind it, a history in the store. Its time counts
from the end of the first one to its own first token. Saving: a prompt and `STEPS` decode steps; its time
counts until the next job could begin. Both are measured with nothing to load or save, too: what is hidden
whole takes no longer. Trials of all kinds take turns.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from benchmarks.paced_link import PacedLink
from benchmarks.report import Report, Row, p50
from kvcommons.blockstore.loader import BlockLoader
from kvcommons.blockstore.saver import BlockSaver
from kvcommons.engine.chunk_rows import ChunkRows, logits
from kvcommons.engine.core import Core, make_core
from kvcommons.engine.engine import Engine
from kvcommons.engine.history import Histories
from kvcommons.engine.keeper import BlockKeeper, KeptRun
from kvcommons.engine.load_or_compute import AlwaysLoad
from kvcommons.engine.predictor import Predictor
from kvcommons.engine.prompt import FirstToken, Prompt
from kvcommons.engine.prompt_engine import prompt_engine
from kvcommons.engine.prompt_memory import WholePrompt
from kvcommons.engine.prompts import Prompts
from kvcommons.engine.read_buffer import ReadBuffer
from kvcommons.engine.request import Request
from kvcommons.engine.scheduler import Scheduler
from kvcommons.engine.sequence import Sequence as Computed
from kvcommons.errors import Internal, KVCommonsError
from kvcommons.model.sampling import SamplingParams
from kvcommons.prefill.handover import HandOver, Listener, PromptEvent
from kvcommons.prefill.push import Delivery, Pusher
from kvcommons.prefill.targets import TargetTable
from kvcommons.rblock.identity import IdentityChain
from kvcommons.telemetry.trace import Tracer
from kvcommons.transport.deadline import Deadline

SALT = bytes(32)
STEPS = 20  # of decode, as in the paper
BEFORE_TOKENS = 512  # of the job before the measured one
WAIT_S = 120.0
BUFFER_BYTES = 4 << 30

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    history_tokens: int = 1024
    new_tokens: int = 100
    buffers: tuple[int, ...] = (0, 5, 10, 15)  # layers
    prompts: tuple[int, ...] = (1024, 1216, 1408, 1600)
    load_share: float = 1.56  # 0: the link is as quick as it is
    save_share: float = 0.16  # likewise
    rounds: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A job's result, and when it came (monotonic seconds)."""

    first: FirstToken
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """An engine that computes prompts, and what they need."""

    engine: Engine
    pusher: Pusher
    memory: WholePrompt


class Trials:
    """Jobs on engines that share a model and nothing else: each has memory of its own, so that no block is
    found there."""

    def __init__(self, core: Core, link: PacedLink) -> None:
        self._core = core
        self._link = link
        self._serial = itertools.count(1)
        self._chunk_tokens = -(-BEFORE_TOKENS // core.block_tokens) * core.block_tokens
        self._predictor = Predictor()
        self._cost = AlwaysLoad(partial(self._predictor.prompt_seconds, chunk_tokens=self._chunk_tokens))
        self.saver = BlockSaver("bench", buffer_bytes=BUFFER_BYTES)
        self.loader = BlockLoader(lambda _: None)

    @property
    def layers(self) -> int:
        return self._core.layout.layers

    def close(self) -> None:
        self.loader.close()
        self.saver.close(Deadline.after(5.0))

    def tokens(self, count: int) -> tuple[int, ...]:
        """Of a prompt that no other one begins with."""
        serial, vocab = next(self._serial), self._core.info.vocab_size
        return tuple((serial * 7919 + i * 104729) % (vocab - 2) + 1 for i in range(count))

    def core(self, tokens: int) -> Core:
        """Fresh memory for prompts of so many tokens in all."""
        capacity = tokens + 4 * self._core.block_tokens
        return make_core(self._core.model, self._core.info, capacity_tokens=capacity)

    @contextmanager
    def engine(self, core: Core, read_buffer: ReadBuffer) -> Iterator[Prefill]:
        """Not started yet: jobs that are submitted before it is begin together."""
        pusher = Pusher(core.memory, core.allocator, call_deadline_s=5.0)
        scheduler, keeper = Scheduler(max_queue=4, max_prompts=4), BlockKeeper(core, self.saver)
        prompts = Prompts(
            core,
            scheduler,
            chunk_tokens=self._chunk_tokens,
            keeper=keeper,
            histories=Histories(core, self.loader),
            read_buffer=read_buffer,
            predictor=self._predictor,
            cost=self._cost,
            tracer=Tracer.off(),
        )
        engine = prompt_engine(core, scheduler, prompts, keeper)
        try:
            yield Prefill(engine=engine, pusher=pusher, memory=WholePrompt(core, prompts))
        finally:
            engine.stop(5.0)
            pusher.stop()

    def run(
        self, prefill: Prefill, prompts: Sequence[tuple[tuple[int, ...], int, bool]], *, running: bool = False
    ) -> list[Timed]:
        """Jobs of (tokens, blocks in the store, save) together, in order. `running`: the engine has run some
        before."""
        done = threading.Semaphore(0)
        results: dict[int, Timed | KVCommonsError] = {}

        def listener(number: int) -> Listener:
            def hear(event: PromptEvent) -> None:
                if isinstance(event, FirstToken):
                    results[number] = Timed(first=event, at_s=time.monotonic())
                elif isinstance(event, KVCommonsError):
                    results[number] = event
                else:
                    return
                done.release()

            return hear

        for number, (tokens, matched, save) in enumerate(prompts):
            delivery = Delivery(Deadline.after(WAIT_S), "")
            sink = HandOver(prefill.pusher, delivery, TargetTable(()), 0, listener(number))
            prefill.engine.submit(self._prompt(prefill, sink, tokens, matched, save))
        if not running:
            prefill.engine.start()
        timed: list[Timed] = []
        for _ in prompts:
            if not done.acquire(timeout=WAIT_S):
                raise Internal("a job did not end in time")
        for number in range(len(prompts)):
            result = results[number]
            if isinstance(result, KVCommonsError):
                raise result
            timed.append(result)
        return timed

    def _prompt(
        self, prefill: Prefill, sink: HandOver, tokens: tuple[int, ...], matched: int, save: bool
    ) -> Prompt:
        info, key = self._core.info, prefill.engine.new_key()
        request = Request(
            request_id=f"job-{key}",
            session_id="",
            tenant="bench",
            salt=SALT,
            tokens=tokens,
            prompt_tokens=len(tokens),
            sampling=SamplingParams(),
            store_control="",
            store_data=self._link.address if matched or save else "",
            matched_blocks=matched,
            no_reuse=False,
        )
        now = time.monotonic()
        return Prompt(
            sequence=Computed(
                key=key, request=request, block_tokens=info.block_tokens, chain=request.chain(info)
            ),
            sink=sink,
            memory=prefill.memory,
            deadline_s=now + WAIT_S,
            submitted_s=now,
        )

    def kept(self, core: Core, tokens: tuple[int, ...]) -> KeptRun:
        """All full blocks of a prompt that an engine on this core has computed; hold them meanwhile."""
        chain = IdentityChain(SALT, core.info.fingerprint, core.block_tokens)
        ids = chain.extend(tokens)
        blocks = core.allocator.match(ids)
        if len(blocks) < len(ids):
            raise Internal("the prompt's blocks are gone already")
        return KeptRun(
            store=self._link.address, tenant="bench", parent=b"", first_index=0, ids=tuple(ids),
            blocks=tuple(blocks),
        )  # fmt: skip

    def flush(self) -> None:
        if not self.saver.flush(Deadline.after(WAIT_S)):
            raise Internal("the store did not take the blocks in time")


class Loading:
    """Figure 19: the prefill time of a job with a history in the store."""

    def __init__(self, trials: Trials, link: PacedLink, setting: Setting) -> None:
        self._trials = trials
        self._link = link
        self._setting = setting
        self._history = trials.tokens(setting.history_tokens)

    def prepare(self) -> None:
        """Saves the history, and sets the link's speed by what computing takes, if it is not as it is."""
        trials, setting = self._trials, self._setting
        core = trials.core(setting.history_tokens)
        with trials.engine(core, self._buffer(None)) as engine:
            trials.run(engine, [(self._history, 0, True)])
        trials.flush()
        plain = [self._trial(self._buffer(self._trials.layers))[1] for _ in range(3)]
        history_bytes = self._blocks() * core.layout.block_bytes
        if setting.load_share:
            self._link.bytes_per_s = history_bytes / (setting.load_share * p50(plain))
        for _ in range(3):
            self._trial(self._buffer(None))  # rates become known

    def modes(self) -> dict[str, ReadBuffer | None]:
        """None: the history is in the engine's own memory, so that there is nothing to load."""
        modes: dict[str, ReadBuffer | None] = {"no pre-loading": replace(self._buffer(0), whole_first=True)}
        for layers in self._setting.buffers:
            modes[f"buffer of {layers} layers"] = self._buffer(layers)
        return {**modes, "buffer by the formula": self._buffer(None), "nothing to load": None}

    def seconds(self, mode: str) -> float:
        return self._trial(self.modes()[mode])[0]

    def _trial(self, read_buffer: ReadBuffer | None) -> tuple[float, float]:
        """The job's time from the end of the one before, and what computing took of it. With nothing to load
        there is none before it: its time is from when it was handed in."""
        trials, setting = self._trials, self._setting
        core = trials.core(setting.history_tokens + setting.new_tokens + BEFORE_TOKENS)
        own = trials.tokens(setting.new_tokens)
        with trials.engine(core, read_buffer or self._buffer(None)) as engine:
            if read_buffer is None:
                trials.run(engine, [(self._history, 0, False)])
                began_s = time.monotonic()
                [measured] = trials.run(engine, [(self._history + own, 0, False)], running=True)
            else:
                jobs = [
                    (trials.tokens(BEFORE_TOKENS), 0, False),
                    (self._history + own, self._blocks(), False),
                ]
                before, measured = trials.run(engine, jobs)
                began_s = before.at_s
        if measured.first.cached_tokens != self._blocks() * core.block_tokens:
            raise Internal("the history was computed anew: the figure would be no one's")
        return measured.at_s - began_s, measured.first.compute_us / 1e6

    def _blocks(self) -> int:
        return self._setting.history_tokens // self._trials.core(1).block_tokens

    def _buffer(self, layers: int | None) -> ReadBuffer:
        return ReadBuffer(layers=self._trials.layers, bytes_max=BUFFER_BYTES, fixed_layers=layers)


class Saving:
    """Figure 20: a prompt and some steps of decode, until the next job could begin."""

    def __init__(self, trials: Trials, link: PacedLink, setting: Setting) -> None:
        self._trials = trials
        self._link = link
        self._setting = setting

    def prepare(self) -> None:
        self._link.bytes_per_s = 0.0
        tokens = self._setting.prompts[0]
        execution_s = p50([self.seconds(tokens, None) for _ in range(2)])
        if not self._setting.save_share:
            return
        layout = self._trials.core(1).layout
        size = max(1, tokens // layout.block_tokens) * layout.block_bytes
        self._link.bytes_per_s = size / (self._setting.save_share * execution_s)

    def seconds(self, tokens: int, when: Literal["after", "meanwhile"] | None) -> float:
        """`when` the prompt is saved; None: not at all."""
        trials = self._trials
        core = trials.core(tokens + STEPS)
        prompt = trials.tokens(tokens)
        buffer = ReadBuffer(layers=trials.layers, bytes_max=0)
        with trials.engine(core, buffer) as engine:
            began_s = time.monotonic()
            trials.run(engine, [(prompt, 0, when == "meanwhile")])
            run = trials.kept(core, prompt)
            _decode(core, run.blocks)
            if when == "after":
                BlockKeeper(core, trials.saver).save_all_layers(run)
                trials.flush()
            took_s = time.monotonic() - began_s
            trials.flush()
            core.allocator.release(run.blocks)
        return took_s


def _decode(core: Core, blocks: tuple[int, ...]) -> None:
    """Some tokens, one after the other, after the full blocks of a prompt."""
    more = core.allocator.allocate(-(-STEPS // core.block_tokens))
    length = len(blocks) * core.block_tokens
    tokens = [1] * (length + STEPS)
    with torch.inference_mode():
        for position in range(length, length + STEPS):
            table = torch.tensor([*blocks, *more])
            logits(core, ChunkRows(core, tokens, range(position, position + 1), table), [0])
    core.allocator.release(more)


def measure(core: Core, link: PacedLink, setting: Setting, progress: Progress) -> Report:
    """Interleaved rounds of all kinds of trials; medians, and ratios against the first kind."""
    trials = Trials(core, link)
    rows: list[Row] = []
    ratios: dict[str, float] = {}
    try:
        loading = Loading(trials, link, setting)
        progress("saving the history")
        loading.prepare()
        load_s: dict[str, list[float]] = {mode: [] for mode in loading.modes()}
        for number in range(setting.rounds):
            progress(f"loading, round {number + 1} of {setting.rounds}")
            for mode, times in load_s.items():
                times.append(loading.seconds(mode))
        plain, *others = load_s
        for mode, times in load_s.items():
            rows.append({"how": mode, "figure": "19", "trials": len(times), "prefill ms": p50(times) * 1000})
        for mode in others:
            pairs = zip(load_s[mode], load_s[plain], strict=True)
            ratios[f"prefill_{mode.replace(' ', '_')}"] = p50([ours / theirs for ours, theirs in pairs])
        saving = Saving(trials, link, setting)
        saving.prepare()
        for tokens in setting.prompts:
            progress(f"saving prompts of {tokens} tokens")
            saves = [
                [saving.seconds(tokens, when) for when in ("after", "meanwhile", None)]
                for _ in range(setting.rounds)
            ]
            for index, how in enumerate(("saved after", "saved meanwhile", "nothing saved")):
                took_ms = p50([trial[index] for trial in saves]) * 1000
                rows.append(
                    {
                        "how": f"{tokens} tokens, {how}",
                        "figure": "20",
                        "trials": len(saves),
                        "round ms": took_ms,
                    }
                )
            ratios[f"round_{tokens}_saved_meanwhile"] = p50([trial[1] / trial[0] for trial in saves])
            ratios[f"round_{tokens}_nothing_saved"] = p50([trial[2] / trial[0] for trial in saves])
    finally:
        trials.close()
    workload = f"{setting.history_tokens} tokens of history, {setting.new_tokens} new"
    return Report(
        title=f"{workload}: what overlapping brings",
        ratios=ratios,
        rows=rows,
    )
