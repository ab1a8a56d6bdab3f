"""A scripted prefill and decode behind real gRPC, for what only the router does: tokens come as a test says,
and streams break where it says. What they answer is a function of the position alone, as a real pair's is of
the tokens."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvcommons.errors import KVCommonsError
from kvcommons.pb import common_pb2 as pb
from kvcommons.pb import (
    decode_pb2,
    decode_pb2_grpc,
    ledger_pb2,
    ledger_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)
from kvcommons.rpc.server import RpcServer
from kvcommons.telemetry.telemetry import Telemetry
from kvcommons.token_ids import unpacked
from services.decode.batching.listeners import TokenListeners
from tests.machine import scaled

ITERATION_S = 0.02
SENT_S_MAX = 1.0


class AskedJob:
    """A job as a pair was asked for it, its tokens one by one."""

    def __init__(self, job: pb.Job) -> None:
        self._job = job
        self.tokens = unpacked(job.tokens).tolist()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._job, name)


@dataclass
class Started:
    """A sequence that waits for prefill: `called` when a job for it has begun, `first` when one that pushed
    enough is done, `ended` when decode's stream is over."""

    push_from_block: int
    called: asyncio.Event = field(default_factory=asyncio.Event)
    first: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Script:
    """What the pair answers with, and where it fails. `answers[choice]` are ids, the last of them
    repeated."""

    answers: list[list[int]] = field(default_factory=list)
    delay_s: float = 0.0
    cached_tokens: int = 0
    device_tokens: int = 0  # of those
    tells: Literal["first", "last", "never"] = "first"  # when prefill gives its token and account
    reserve_error: KVCommonsError | None = None
    reserve_errors: int = 0  # how many Generate calls fail with it
    fail_at: dict[int, KVCommonsError] = field(default_factory=dict)  # answer index to error, once each
    prefill_fails: list[KVCommonsError] = field(default_factory=list)  # one a Compute call
    missing: list[int] = field(default_factory=list)  # push_from_block of a Missing event, one a sequence
    borrowed: dict[int, list[decode_pb2.BorrowedBlocks]] = field(default_factory=dict)  # by answer index
    accepted: set[int] = field(default_factory=set)  # answer indices of tokens that were predicted
    rejected: dict[int, int] = field(default_factory=dict)  # by answer index: drafts that did not come
    stall_at: int | None = None  # answer index before which decode falls silent, once
    # What any prefill tells any decode, by the handle of the sequence.
    started: dict[int, Started] = field(default_factory=dict)
    handles: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def token(self, job: Any, position: int) -> pb.SampledToken:
        answer = self.answers[job.sampling.choice % len(self.answers)]
        at = position - job.prompt_tokens
        token = answer[min(at, len(answer) - 1)]
        sampled = pb.SampledToken(
            token=token,
            position=position,
            accepted_prediction=at in self.accepted,
            rejected_prediction_tokens=self.rejected.get(at, 0),
        )
        if job.sampling.logprobs:
            sampled.logprob = math.log(0.5)
            for rank in range(job.sampling.top_logprobs):
                sampled.top.add(token=(token + rank) % 1024, logprob=math.log(0.5) - rank)
        return sampled

    def prompt_logprobs(self, job: Any) -> list[pb.PromptLogprobs]:
        """In two messages: a token at position p has -p / 8, and each alternative is a token on and 1
        less."""
        top, positions = job.prompt_logprobs, range(1, len(job.tokens))
        halves = (positions[: len(positions) // 2], positions[len(positions) // 2 :])
        return [
            pb.PromptLogprobs(
                first=half.start,
                logprobs=[-position / 8 for position in half],
                ranks=[1 + position % 3 for position in half],
                top=top,
                top_tokens=[(job.tokens[position] + at) % 1024 for position in half for at in range(top)],
                top_logprobs=[-position / 8 - at for position in half for at in range(top)],
            )
            for half in halves
            if half
        ]


class ScriptedDecode(decode_pb2_grpc.DecodeServicer):
    def __init__(self, script: Script) -> None:
        self.script = script
        self.jobs: list[AskedJob] = []
        self.running = 0
        self._listeners = TokenListeners()
        self._sending: list[asyncio.Event] = []  # tokens that a listener's call has not sent yet

    async def Listen(
        self, request: decode_pb2.ListenRequest, context: Any
    ) -> AsyncIterator[decode_pb2.IterationTokens]:
        with self._listeners.listening(request.listener) as listener:
            async for message in listener.messages():
                sending, self._sending = self._sending, []
                yield message
                for sent in sending:
                    sent.set()

    async def Generate(
        self, request: decode_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[decode_pb2.GenerateEvent]:
        job = AskedJob(request.job)
        self.jobs.append(job)
        if self.script.reserve_errors > 0 and self.script.reserve_error is not None:
            self.script.reserve_errors -= 1
            raise self.script.reserve_error
        handle = next(self.script.handles)
        matched = request.job.history.matched_blocks
        started = self.script.started[handle] = Started(push_from_block=matched)
        self.running += 1
        try:
            placement = pb.SegmentPlace(data_address="unix:/nowhere", handle=handle, epoch=1, blocks=8)
            yield decode_pb2.GenerateEvent(
                reserved=decode_pb2.Reserved(placements=[placement], push_from_block=matched)
            )
            if self.script.missing:
                await started.called.wait()
                started.push_from_block = self.script.missing.pop(0)
                missing = decode_pb2.Missing(push_from_block=started.push_from_block)
                yield decode_pb2.GenerateEvent(missing=missing)
            await started.first.wait()
            async for event in self._tokens(job, request.listener):
                yield event
        finally:
            started.ended.set()
            self.running -= 1

    async def _tokens(self, job: AskedJob, name: str) -> AsyncIterator[decode_pb2.GenerateEvent]:
        """The first one comes in the sequence's own call, those behind it where its router listens."""
        for position in itertools.count(len(job.tokens)):
            index = position - job.prompt_tokens
            if index in self.script.fail_at:
                await asyncio.sleep(ITERATION_S)  # what was sent before is heard
                raise self.script.fail_at.pop(index)
            if index in self.script.borrowed:
                borrowed = decode_pb2.Borrowed(holders=self.script.borrowed[index])
                yield decode_pb2.GenerateEvent(borrowed=borrowed)
            if self.script.stall_at == index:
                self.script.stall_at = None
                await asyncio.Event().wait()
            token = self.script.token(job, position)
            await asyncio.sleep(self.script.delay_s)
            listener = self._listeners.find(name) if position > len(job.tokens) else None
            if listener is not None:
                listener.tell(job.request_id, [token])
                await self._sent()
            else:
                yield decode_pb2.GenerateEvent(tokens=decode_pb2.Tokens(tokens=[token]))
            sent = position + 1 - len(job.tokens)
            stopped = token.token in job.sampling.stop_token_ids
            if stopped or position + 1 >= job.max_position:
                reason = "stop" if stopped else "length"
                yield decode_pb2.GenerateEvent(finished=decode_pb2.Finished(reason=reason, tokens=sent))
                return

    async def _sent(self) -> None:
        """As in a call of its own, the next token is made once this one was sent; or the listener is gone."""
        sent = asyncio.Event()
        self._sending.append(sent)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SENT_S_MAX):
                await sent.wait()


class ScriptedPrefill(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[prefill_pb2.PrefillRequest] = []
        self.running = 0

    @property
    def jobs(self) -> list[AskedJob]:
        return [AskedJob(request.job) for request in self.requests]

    async def Compute(
        self, request: prefill_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        self.requests.append(request)
        job = AskedJob(request.job)
        delay_s = self.script.delay_s  # as it is when the request is there: a test may change it for the next
        # Without targets nobody goes on from the prompt.
        started = Started(push_from_block=0)
        if request.targets:
            started = self.script.started[request.targets[0].handle]
        started.called.set()
        self.running += 1
        try:
            yield prefill_pb2.PrefillEvent(started=prefill_pb2.PrefillStarted(queued_us=1))
            await asyncio.sleep(delay_s)
            asked = request.job.HasField("prompt_logprobs")
            logprobs = self.script.prompt_logprobs(job) if asked else []
            for message in logprobs[:1]:
                yield prefill_pb2.PrefillEvent(logprobs=message)
            if self.script.prefill_fails:
                raise self.script.prefill_fails.pop(0)
            for message in logprobs[1:]:
                yield prefill_pb2.PrefillEvent(logprobs=message)
            token = self.script.token(job, len(job.tokens))
            if request.push_from_block <= started.push_from_block:
                started.first.set()
            if self.script.tells == "last":
                await started.ended.wait()
            elif self.script.tells == "never":
                await asyncio.Event().wait()
            first = prefill_pb2.PrefillFirst(
                token=token,
                cached_tokens=self.script.cached_tokens,
                device_tokens=self.script.device_tokens,
                queue_us=10,
                compute_us=20,
            )
            yield prefill_pb2.PrefillEvent(first=first)
        finally:
            self.running -= 1

    async def Inspect(
        self, request: prefill_pb2.PrefillInspectRequest, context: Any
    ) -> prefill_pb2.PrefillInspectReply:
        return prefill_pb2.PrefillInspectReply(jobs=self.running)


class Engine:
    """One instance of each on a socket of its own."""

    def __init__(self, folder: Path, name: str, script: Script, model: pb.ModelInfo) -> None:
        self.script = script
        self.decode = ScriptedDecode(script)
        self.prefill = ScriptedPrefill(script)
        self._model = model
        self._name = name
        self.costs: dict[str, float] = {}  # that it says of itself
        self.prefill_blocks = self.decode_blocks = 128  # likewise
        self.lends_blocks = 0  # likewise, of decode's
        self._server = RpcServer(f"unix:{folder}/{name}.sock", Telemetry.off(name))
        self._server.add(decode_pb2_grpc.add_DecodeServicer_to_server, self.decode)
        self._server.add(prefill_pb2_grpc.add_PrefillServicer_to_server, self.prefill)

    async def start(self) -> None:
        await self._server.start()

    def serves(self, model: pb.ModelInfo) -> None:
        """Another model, from the next view of the ledger on."""
        self._model = model

    async def stop(self) -> None:
        """At once, calls under way included."""
        await self._server.drain(0.0)

    @property
    def calls(self) -> int:
        """Under way."""
        return self.decode.running + self.prefill.running

    def instances(self, *, ready: bool = True) -> list[ledger_pb2.Instance]:
        blocks = {"prefill": self.prefill_blocks, "decode": self.decode_blocks}
        return [
            ledger_pb2.Instance(
                id=f"{service}-{self._name}",
                service=service,
                control_address=self._server.address,
                host="here",
                model=self._model,
                load=ledger_pb2.Load(
                    total_blocks=blocks[service],
                    free_blocks=blocks[service],
                    lend_blocks_max=self.lends_blocks if service == "decode" else 0,
                    ready=ready,
                    costs=self.costs,
                    chunk_tokens=512,
                ),
            )
            for service in ("prefill", "decode")
        ]


class ScriptedLedger(ledger_pb2_grpc.LedgerServicer):
    """A view that a test writes."""

    def __init__(self, folder: Path) -> None:
        self.address = f"unix:{folder}/ledger.sock"
        self._instances: list[ledger_pb2.Instance] = []
        self.settlements: list[ledger_pb2.SettlementReport] = []
        self.asked = 0  # for settlements
        self.silent_ms: dict[str, int] = {}
        self._changed = asyncio.Condition()
        self._server = RpcServer(self.address, Telemetry.off("ledger"))
        self._server.add(ledger_pb2_grpc.add_LedgerServicer_to_server, self)

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        await self._server.drain(0.0)

    async def show(self, instances: list[ledger_pb2.Instance]) -> None:
        async with self._changed:
            self._instances = instances
            self._changed.notify_all()

    async def Heartbeat(
        self, request: ledger_pb2.HeartbeatRequest, context: Any
    ) -> ledger_pb2.HeartbeatReply:
        return ledger_pb2.HeartbeatReply(heartbeat_ms=500)

    async def Watch(self, request: ledger_pb2.WatchRequest, context: Any) -> AsyncIterator[ledger_pb2.View]:
        for revision in itertools.count(1):
            yield ledger_pb2.View(instances=self._instances, revision=revision, silent_ms=self.silent_ms)
            async with self._changed:
                try:
                    async with asyncio.timeout(scaled(1.0)):
                        await self._changed.wait()
                except TimeoutError:
                    pass

    async def Candidates(
        self, request: ledger_pb2.CandidatesRequest, context: Any
    ) -> ledger_pb2.CandidatesReply:
        return ledger_pb2.CandidatesReply()

    async def ReportRefusal(
        self, request: ledger_pb2.ReportRefusalRequest, context: Any
    ) -> ledger_pb2.ReportRefusalReply:
        return ledger_pb2.ReportRefusalReply()

    async def Settlements(
        self, request: ledger_pb2.SettlementsRequest, context: Any
    ) -> ledger_pb2.SettlementsReply:
        self.asked += 1
        return ledger_pb2.SettlementsReply(settlements=self.settlements)
