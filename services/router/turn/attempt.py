"""One attempt of a choice: a decode stream and a prefill call on a pair of instances, heard as events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio

from kvcommons.errors import METADATA_KEY, Internal, KVCommonsError, Overloaded, Unavailable
from kvcommons.pb import common_pb2, decode_pb2, kvstore_pb2, prefill_pb2
from kvcommons.pb.common_pb2 import ModelInfo
from kvcommons.rblock.identity import IdentityChain, reusable_blocks
from kvcommons.token_ids import packed
from services.router.capacity.occupancy import Reservation
from services.router.capacity.queue import Ticket
from services.router.capacity.queues import CapacityQueues
from services.router.fleet.fleet import Fleet, blocks_of
from services.router.fleet.pairing import Pair
from services.router.fleet.stored import stored_tiers
from services.router.sessions.replay import replay
from services.router.sessions.truncation import Context
from services.router.turn import events as ev
from services.router.turn.choice import Choice

log = logging.getLogger(__name__)

_LINGER_S = 2.0
_CALL_S_MIN = 0.001
_MATCHED_S = 1.0  # after so long in the capacity queue more may be stored than before


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """What all attempts of a request have in common. `deadline_s` is on the clock."""

    turn_id: str
    session_id: str
    tenant: str
    salt: bytes
    model: ModelInfo
    affinity: str
    home: bytes  # the key whose home has the blocks; empty: that of the first block
    reuse: bool
    deadline_s: float
    tbt_objective_s: float | None = None  # as its class of service has it; None: decode's own
    background: bool = False  # its prompt gives way to others
    prediction: Sequence[int] = ()  # what its answers may be
    context: Context | None = None  # of a session

    def chain(self) -> IdentityChain:
        """To be extended with a choice's tokens."""
        if self.context is not None:
            return self.context.chain()
        return IdentityChain(self.salt, self.model.fingerprint, self.model.block_tokens)


class Attempt:
    """Runs until `close`. Events go to `emit`, on the event loop."""

    def __init__(
        self,
        *,
        request: RequestContext,
        choice: Choice,
        block_ids: Sequence[bytes],
        fleet: Fleet,
        queues: CapacityQueues,
        ticket: Ticket,
        failed: Collection[str],
        emit: Callable[[ev.Event], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`block_ids`: of the full blocks of `choice.tokens`; `ticket`: the choice's, in `queues`; `failed`:
        instances better avoided."""
        self.failed_ids: set[str] = set()  # instances on which this attempt failed
        self.refused = False  # decode had no room; the ticket waits for the next attempt
        self._pair: Pair | None = None
        self._request = request
        self._number = choice.attempt
        self._id = f"{request.turn_id}-{choice.index}-{choice.attempt}"  # unique: of this attempt alone
        self._choice = choice
        self._tokens = choice.tokens
        self._block_ids = block_ids[: reusable_blocks(len(self._tokens), request.model.block_tokens)]
        shares = request.reuse and not choice.lacks_prompt_logprobs
        self._prefix = self._block_ids if shares else ()  # what it may share with others
        self._fleet = fleet.homed(request.home or (block_ids[0] if block_ids else request.turn_id.encode()))
        self._queues = queues
        self._ticket = ticket
        self._failed = failed
        self._deliver = emit
        self._clock = clock
        self._history = common_pb2.History()
        self._tiers: Sequence[kvstore_pb2.Tier.ValueType] = ()  # of the matched blocks
        self._truncated = request.context.now.message() if request.context is not None else None
        self._targets: Sequence[common_pb2.SegmentPlace] = ()
        self.borrowed: dict[str, int] = {}  # of the sequence's blocks, by the holder's id
        self._closed = False
        self._running = asyncio.create_task(self._run())
        self._prefilling: asyncio.Task[None] | None = None

    @property
    def pair(self) -> Pair | None:
        """None while it waits for a permit."""
        return self._pair

    def compute(self, push_from_block: int) -> None:
        """Calls prefill. An earlier call has given its token already."""
        self._prefilling = asyncio.create_task(self._prefill(push_from_block))

    def close(self) -> None:
        """Cancels both calls; nothing is heard from them any more."""
        self._closed = True
        self._running.cancel()
        if self._prefilling is not None:
            self._prefilling.cancel()

    async def linger(self) -> None:
        """Waits, for a short while, until decode has ended its stream by itself, then closes."""
        self._closed = True
        if self._prefilling is not None:
            self._prefilling.cancel()
        try:
            await asyncio.wait((self._running,), timeout=_LINGER_S)
        finally:
            self.close()

    async def _run(self) -> None:
        """From what is stored of the history to the end of decode's stream."""
        at = {"choice": self._choice.index, "attempt": self._number}
        try:
            if not self._choice.generates and await self._computed_alone():
                return
            self._fleet.check(self._request.model, len(self._tokens))
            self._history = await self._match()
            await self._make_history()
            await self._wait_and_stream(at)
        except KVCommonsError as error:
            if isinstance(error, Overloaded) and self._pair is not None and not self._ticket.has_reservation:
                self.refused = True
                self._emit(ev.Refused(error=error, **at))
                return
            if self._pair is not None:
                self._blame(self._pair.decode.id, error)
            self._emit(ev.DecodeFailed(error=error, **at))
        except Exception:
            log.exception("an attempt failed unexpectedly")
            self._emit(
                ev.DecodeFailed(error=Internal("the router failed unexpectedly; its log says why"), **at)
            )

    async def _computed_alone(self) -> bool:
        """Nobody goes on from the prompt, so no decode need have room for it. False where prefill has none
        either: the prompt's KV lies at a decode then, while it is computed."""
        pair, size = self._place(tokens=0), self._request.model.block_tokens
        if -(-len(self._tokens) // size) > pair.prefill.load.total_blocks:
            return False
        self._pair = pair
        self._history = await self._match()
        with self._fleet.reserve(pair, 0):
            await self._prefill(0)
        return True

    async def _wait_and_stream(self, at: dict[str, int]) -> None:
        """Waits for a permit to ask for room, then streams to the end."""
        model, tokens = self._request.model, len(self._tokens)

        def waits(error: KVCommonsError) -> None:
            self._emit(ev.Waits(error=error, **at))

        async with self._queues.permit(self._ticket, model, tokens, waits, self._prefix) as waited_s:
            self._pair = pair = self._place()
            with self._fleet.reserve(pair, blocks_of(model, tokens), self._prefix) as reservation:
                if waited_s > _MATCHED_S:
                    found = await self._match()
                    if found.matched_blocks > self._history.matched_blocks:
                        self._history = found
                finished = await self._stream(pair, reservation, at)
        if not finished:
            raise Unavailable("decode ended its stream without a reason")

    def _place(self, *, tokens: int | None = None) -> Pair:
        """`tokens`: of which decode has to have room; None: all."""
        pair = self._fleet.place(
            self._request.model,
            affinity=self._request.affinity,
            tokens=len(self._tokens) if tokens is None else tokens,
            failed=self._failed,
            prefix=self._prefix,
        )
        if pair is None:
            raise Unavailable(
                f"no prefill and decode are ready for the model {self._request.model.name!r}; "
                "see `kvcommons status`",
                retry_after_ms=2000,
            )
        return pair

    async def _stream(self, pair: Pair, reservation: Reservation, at: dict[str, int]) -> bool:
        """Whether the stream came to its Finished."""

        def came(tokens: Sequence[common_pb2.SampledToken]) -> None:
            length = len(self._tokens) + heard.tokens
            self._fleet.occupancy.grow(reservation, blocks_of(self._request.model, length))
            self._emit(ev.Tokens(tokens=tuple(tokens), **at))

        def lost(error: KVCommonsError) -> None:
            self._blame(pair.decode.id, error)
            self._emit(ev.DecodeFailed(error=error, **at))

        decode = self._fleet.decode(pair.decode)
        with self._fleet.listening.hear(
            decode,
            pair.decode.control_address,
            self._id,
            until_s=self._request.deadline_s,
            came=came,
            lost=lost,
        ) as heard:
            job = self._message()
            job.prediction.extend(self._request.prediction)
            request = decode_pb2.GenerateRequest(
                job=job, start_wait_ms=int(self._remaining_s() * 1000), listener=heard.listener
            )
            call = decode.Generate(request, timeout=self._remaining_s())
            try:
                async for event in call:
                    if event.HasField("finished"):
                        await heard.all(event.finished.tokens, self._remaining_s())
                        reservation.reported_end = event.finished.change
                        self._emit(ev.Finished(reason=event.finished.reason, **at))
                        return True
                    if event.HasField("tokens"):
                        heard.take(event.tokens.tokens)
                    else:
                        self._news(event, pair, reservation, at)
            finally:
                call.cancel()
        return False

    def _news(
        self, event: decode_pb2.GenerateEvent, pair: Pair, reservation: Reservation, at: dict[str, int]
    ) -> None:
        """What decode says of a sequence besides its tokens and its end."""
        match event.WhichOneof("event"):
            case "reserved":
                reserved = event.reserved
                self._targets = reserved.placements
                self._reserved(reservation, reserved)
                self._borrow(reserved.placements[1:])  # its own part is the first
                self._emit(
                    ev.Reserved(
                        push_from_block=reserved.push_from_block,
                        computes=reserved.computes,
                        instance=pair.decode.id,
                        holders=tuple(self.borrowed),
                        **at,
                    )
                )
            case "prefilled":
                self._emit(self._first(event.prefilled, pair.decode.id, at))
            case "missing":
                self._emit(ev.Missing(push_from_block=event.missing.push_from_block, **at))
            case "borrowed":
                self._borrow(event.borrowed.holders)
                self._emit(ev.Borrowed(holders=tuple(self.borrowed), **at))

    def _reserved(self, reservation: Reservation, reserved: decode_pb2.Reserved) -> None:
        blocks = [placement.blocks for placement in reserved.placements]  # its own first
        all_blocks = blocks_of(self._request.model, len(self._tokens))  # holders may join later
        self._fleet.occupancy.confirm(
            reservation,
            change=reserved.change,
            local=sum(blocks[:1]),
            remote=max(sum(blocks[1:]), all_blocks - sum(blocks[:1])),
            epoch=reserved.placements[0].epoch if reserved.placements else 0,
        )
        self._queues.reserved(self._ticket, self._request.model)

    async def _prefill(self, push_from_block: int) -> None:
        at = {"choice": self._choice.index, "attempt": self._number}
        assert self._pair is not None, "decode has reserved before prefill is called"
        request = prefill_pb2.PrefillRequest(
            job=self._message(), targets=self._targets, push_from_block=push_from_block
        )
        logprobs: list[common_pb2.PromptLogprobs] = []
        try:
            call = self._fleet.prefill(self._pair.prefill).Compute(request, timeout=self._remaining_s())
            try:
                async for event in call:
                    if event.WhichOneof("event") == "started":
                        self._emit(ev.PrefillStarted(**at))
                    elif event.WhichOneof("event") == "logprobs":
                        logprobs.append(event.logprobs)
                    elif event.WhichOneof("event") == "first":
                        self._emit(self._first(event.first, self._pair.prefill.id, at, logprobs))
                        return
            finally:
                call.cancel()
            raise Unavailable("prefill ended its stream without a token")
        except KVCommonsError as error:
            self._blame(self._pair.prefill.id, error)
            self._emit(ev.PrefillFailed(error=error, **at))
        except Exception:
            log.exception("an attempt failed unexpectedly")
            self._emit(
                ev.PrefillFailed(error=Internal("the router failed unexpectedly; its log says why"), **at)
            )

    def _message(self) -> common_pb2.Job:
        """The same for decode and for prefill, but for what only decode needs."""
        logprobs = self._choice.prompt_logprobs
        wanted = logprobs is not None and self._choice.lacks_prompt_logprobs
        return common_pb2.Job(
            request_id=self._id,
            session_id=self._request.session_id,
            tenant=self._request.tenant,
            salt=self._request.salt,
            model=self._request.model.fingerprint,
            tokens=packed(self._tokens),
            prompt_tokens=len(self._choice.prompt),
            # Decode samples one token at least: of an answer of none nobody sees it.
            max_position=max(self._choice.max_position, len(self._tokens) + 1),
            sampling=self._choice.sampling,
            history=self._history,
            no_reuse=not self._request.reuse,
            prompt_logprobs=logprobs.top if logprobs is not None and wanted else None,
            truncated=self._truncated,
            background=self._request.background,
            tbt_objective_ms=round(1000 * (self._request.tbt_objective_s or 0)),
        )

    async def _match(self) -> common_pb2.History:
        """What of the history is stored; nothing where the store is away, for it can be computed."""
        store = self._fleet.store()
        if store is None:
            return common_pb2.History()
        matched = 0
        if self._request.reuse:
            tiers = await stored_tiers(
                self._fleet, self._request.model, self._block_ids, timeout_s=self._remaining_s()
            )
            self._tiers = tiers or ()
            matched = len(self._tiers)
        return common_pb2.History(
            control_address=store.control_address, data_address=store.data_address, matched_blocks=matched
        )

    async def _make_history(self) -> None:
        """Behind a truncation, what was computed before it can only be found, or made by a replay."""
        context = self._request.context
        if context is None or self._history.matched_blocks >= context.now.since_block:
            return
        pair = self._place()
        try:
            await replay(
                self._fleet,
                pair.prefill,
                self._message(),
                context,
                self._request.model,
                timeout_s=self._remaining_s(),
            )
        except KVCommonsError as error:
            self._blame(pair.prefill.id, error)
            raise
        self._history = await self._match()

    def _first(
        self,
        first: prefill_pb2.PrefillFirst,
        instance: str,
        at: dict[str, int],
        logprobs: Sequence[common_pb2.PromptLogprobs] = (),
    ) -> ev.First:
        """What was cached and not on the device came from where the store said that it was."""
        block_tokens = self._request.model.block_tokens
        device, cached = (tokens // block_tokens for tokens in (first.device_tokens, first.cached_tokens))
        loaded = list(self._tiers[device:cached])
        figures: dict[str, Any] = {
            name: getattr(first, name)
            for name in ("cached_tokens", "device_tokens", "queue_us", "compute_us", "load_wait_us")
        }
        return ev.First(
            token=first.token,
            dram_tokens=loaded.count(kvstore_pb2.TIER_DRAM) * block_tokens,
            disk_tokens=loaded.count(kvstore_pb2.TIER_DISK) * block_tokens,
            instance=instance,
            prompt_logprobs=tuple(logprobs),
            **figures,
            **at,
        )

    def _borrow(self, holders: Iterable[common_pb2.SegmentPlace | decode_pb2.BorrowedBlocks]) -> None:
        """Notes who has a part of the sequence besides decode itself, as far as they are known."""
        self.borrowed = {}
        for holder in holders:
            # A head group goes by its first part.
            name = self._fleet.at(holder.data_address.partition(",")[0])
            if name is not None:
                self.borrowed[name] = self.borrowed.get(name, 0) + holder.blocks

    def _emit(self, event: ev.Event) -> None:
        if not self._closed:
            self._deliver(event)

    def _blame(self, instance_id: str, error: KVCommonsError) -> None:
        """An instance that cannot be reached is left out by all requests, until its next heartbeat."""
        self.failed_ids.add(instance_id)
        if isinstance(error, Unavailable) and _unreached(error):
            self._fleet.suspect(instance_id)

    def _remaining_s(self) -> float:
        return max(self._request.deadline_s - self._clock(), _CALL_S_MIN)


def _unreached(error: KVCommonsError) -> bool:
    """The peer itself said nothing: gRPC says that it is away."""
    cause = error.__cause__
    if not isinstance(cause, grpc.aio.AioRpcError):
        return False
    metadata: Any = cause.trailing_metadata()  # pairs, though its stub says otherwise
    return all(key != METADATA_KEY for key, _ in metadata or ())
