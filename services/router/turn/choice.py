"""One choice of a turn: a state machine without I/O, from its prompt to its finish reason over any failures.

    idle -> running -> finished, failed
              |  ^
              v  |
            retrying    (an attempt failed: the next one begins with prompt + generated)

Tokens are known by their position, so that one heard twice (from prefill and from decode, or after a
resumption) counts once, and one that comes early waits for those before it. Decode's stream may overtake
prefill's: what decode sends is held for a moment until prefill has said what it reused. The end of the answer
is held as long as a silent stream is waited for, for it would otherwise come without that account."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from kvcommons.errors import (
    Conflict,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidInput,
    KVCommonsError,
    NotFound,
    Overloaded,
    PermissionDenied,
    TooLarge,
    Unauthenticated,
    Unavailable,
    Unprocessable,
)
from kvcommons.pb import common_pb2 as pb
from kvcommons.token_ids import token_array
from services.router.answer.parts import Part, joined
from services.router.answer.text import AnswerText, Piece, Shown
from services.router.turn import events as ev
from services.router.turn.prompt_logprobs import LogprobsOfPrompt

# Errors that any instance would give: trying another one is of no use.
_FINAL = (
    InvalidInput, NotFound, Conflict, PermissionDenied, TooLarge, Unauthenticated, Unprocessable,
)  # fmt: skip

_RETRY_DELAY_S_MIN = 0.05
_RETRY_DELAY_S_MAX = 1.0
# Decode starts when prefill tells it to, and prefill's own word comes within milliseconds of that. Where it
# does not (a call was lost, and is made again), text is worth more than the account, and only the end waits.
_ACCOUNT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """`resume_s`: how long without a new token while attempts fail. `stall_s`: how long a decode stream may
    be silent. `strikes`: how many attempts in a row may fail after prefill began to compute, for a request
    that kills its instances must not go through all of them. A choice waits for room in memory
    as long as its request may."""

    resume_s: float
    stall_s: float
    strikes: int = 4


@dataclass(slots=True, kw_only=True)
class Reuse:
    """Where the prompt's KV came from in the first prefill that finished (tokens), and what that took."""

    cached_tokens: int
    device_tokens: int
    dram_tokens: int
    disk_tokens: int
    queue_us: int
    compute_us: int
    load_wait_us: int


@dataclass(slots=True, kw_only=True)
class Instances:
    """Ids of those that served a choice, each once, in the order in which they joined."""

    prefill: list[str] = field(default_factory=list)  # computed the prompt; a decode instance may
    decode: list[str] = field(default_factory=list)  # sent tokens
    holders: list[str] = field(default_factory=list)  # lent memory, and computed attention over it


class ChoiceState(Enum):
    """Of a choice."""

    IDLE = auto()
    RUNNING = auto()  # an attempt is under way
    RETRYING = auto()  # an attempt was given up, and the next one has not begun
    FINISHED = auto()  # with `finish_reason`
    FAILED = auto()  # with `error`


class Phase(Enum):
    """What a choice that has not ended is at, for people who watch."""

    WAITING = "waiting"  # in the queue, and for room at decode
    COMPUTING = "computing"  # its prompt
    GENERATING = "generating"
    RESUMING = "resuming"  # an attempt failed, and the next one has not begun


class _Prefill(Enum):
    """How far prefill's job is in an attempt."""

    QUEUED = auto()
    COMPUTING = auto()
    DONE = auto()  # it has given its token


@dataclass(slots=True, kw_only=True)
class _Attempt:
    """What is known of one attempt."""

    number: int
    holds: bool  # until prefill's account: what decode sends is kept, and not given out
    prefill: _Prefill = _Prefill.QUEUED
    decode_computes: bool = False  # the prompt, without prefill
    decode: str = ""  # its instance, once it has reserved
    streaming: bool = False  # decode has sent a token
    missing: int | None = None  # what prefill has to push from, once it is done with its job
    early: dict[int, pb.SampledToken] = field(default_factory=dict)
    held_s: float | None = None  # since when there is something that is held
    end: str | None = None  # decode's reason, held like its tokens
    account_lost: bool = False  # prefill's call failed, or hangs
    heard_s: float | None = None  # the last word of decode, or prefill's token


class Choice:
    """Events in (`start`, `handle`, `tick`), actions out. Done when it has finished and prefill's account is
    there, or lost."""

    def __init__(
        self,
        *,
        index: int,
        prompt: Sequence[int],
        max_position: int,
        sampling: pb.Sampling,
        text: AnswerText,
        patience: Patience,
        prompt_logprobs: LogprobsOfPrompt | None = None,
    ) -> None:
        """`max_position`: the sequence's length in tokens, prompt included, at which it ends with "length";
        that of the prompt: nothing is generated. `prompt_logprobs`: those that are wanted of the prompt; its
        choices share them."""
        self.index = index
        self.prompt = prompt
        self.max_position = max_position
        self.sampling = sampling
        self.prompt_logprobs = prompt_logprobs
        self.answer = text
        self.finish_reason: str | None = None
        self.error: KVCommonsError | None = None
        self.reuse: Reuse | None = None
        self.first_token_s: float | None = None
        self.instances = Instances()
        self.resumptions = 0  # how often tokens came again after a failure
        self.waits_for: KVCommonsError | None = None  # what its last attempt failed of, until the next token
        self._patience = patience
        self._state = ChoiceState.IDLE
        self._now = _Attempt(number=0, holds=True)  # the attempt under way, or the last one
        self._finished_s: float | None = None
        self._stuck_s: float | None = None  # since when attempts fail without a new token
        self._failures = 0
        self._strikes = 0

    @property
    def tokens(self) -> array[int]:
        """Prompt and what was generated: what the next attempt computes."""
        tokens = token_array(self.prompt)
        tokens.extend(self.answer.tokens)
        return tokens

    @property
    def generates(self) -> bool:
        """Whether any token is to follow the prompt."""
        return self.max_position > len(self.prompt)

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """They are wanted, and the next attempt is to ask for them: what decode sends is held meanwhile."""
        return self.prompt_logprobs is not None and self.prompt_logprobs.found is None

    @property
    def ended(self) -> bool:
        return self._state in (ChoiceState.FINISHED, ChoiceState.FAILED)

    @property
    def done(self) -> bool:
        """There is nothing more to wait for."""
        return self._state is ChoiceState.FINISHED and (self.reuse is not None or self._now.account_lost)

    @property
    def attempt(self) -> int:
        """Number of the attempt under way, from 1; 0 before the first."""
        return self._now.number

    @property
    def phase(self) -> Phase:
        if self._state is ChoiceState.RETRYING:
            return Phase.RESUMING
        if self._now.streaming:
            return Phase.GENERATING
        return Phase.COMPUTING if self._now.decode else Phase.WAITING

    @property
    def _runs(self) -> bool:
        return self._state is ChoiceState.RUNNING

    def start(self) -> list[ev.Action]:
        """Begins the next attempt."""
        self._state = ChoiceState.RUNNING
        holds = self.reuse is None or self.lacks_prompt_logprobs
        self._now = _Attempt(number=self.attempt + 1, holds=holds)
        return [ev.Start(choice=self.index, attempt=self.attempt)]

    def handle(self, event: ev.Event, now_s: float) -> list[ev.Action]:
        """What follows from an event; nothing if it comes from an attempt that was given up."""
        retrying = self._state is ChoiceState.RETRYING
        if event.attempt != self.attempt or retrying != isinstance(event, ev.RetryDue):
            return []
        if self.ended:
            return self._accounted(event)
        match event:
            case ev.Reserved():
                self._now.decode_computes = event.computes
                self._now.decode = event.instance
                _join(self.instances.holders, *event.holders)
                return [] if event.computes else [self._compute(event.push_from_block)]
            case ev.Borrowed():
                _join(self.instances.holders, *event.holders)
                return []
            case ev.Missing():
                return self._lacks(event.push_from_block)
            case ev.PrefillStarted():
                self._now.prefill = _Prefill.COMPUTING
                return []
            case ev.First():
                return self._first(event, now_s)
            case ev.Tokens():
                self._now.streaming = True
                _join(self.instances.decode, self._now.decode)
                self._keep(event.tokens, now_s)
                return [] if self._now.holds else self._give_out(now_s)
            case ev.Finished():
                self._keep((), now_s)
                self._now.end = event.reason
                return [] if self._now.holds else self._give_out(now_s)
            case ev.PrefillFailed():
                return self._prefill_failed(event.error, now_s)
            case ev.DecodeFailed():
                # What it has sent before is as good as what is sent later: the next attempt goes on after it.
                actions = self._give_out(now_s)
                return actions + self._failed(event.error, now_s) if self._runs else actions
            case ev.Waits():
                # A refusal of its own says more.
                self.waits_for = self.waits_for if isinstance(self.waits_for, Overloaded) else event.error
                return []
            case ev.Refused():
                return self._refused(event.error)
            case ev.RetryDue():
                return self.start()
            case _:
                raise AssertionError(f"no such event: {event!r}")

    def tick(self, now_s: float) -> list[ev.Action]:
        """Call it about once a second: finds a stream that is silent though its sequence runs, and a prefill
        that does not say what it reused."""
        if self._finished_s is not None and not self.done:
            self._now.account_lost = now_s - self._finished_s >= self._patience.stall_s
            return self._leave()
        if not self._runs or self._now.heard_s is None:
            return []
        actions: list[ev.Action] = []
        if self._now.holds and self._now.held_s is not None and now_s - self._now.held_s >= _ACCOUNT_S:
            actions = self._give_out(now_s)
        decodes = self._runs and (self._now.end is None or self.lacks_prompt_logprobs)
        if not decodes or now_s - self._now.heard_s < self._patience.stall_s:
            return actions
        silent = Unavailable(f"decode sent no token for {self._patience.stall_s:g} s")
        return actions + self._failed(silent, now_s)

    def fail(self, error: KVCommonsError) -> list[ev.Action]:
        """Ends the choice with an error, from outside (a deadline, a sibling's failure)."""
        if self.ended:
            return []
        self._state, self.error = ChoiceState.FAILED, error
        return [ev.Release(choice=self.index, attempt=self.attempt)]

    def _compute(self, push_from_block: int) -> ev.Action:
        return ev.Compute(choice=self.index, attempt=self.attempt, push_from_block=push_from_block)

    def _lacks(self, push_from_block: int) -> list[ev.Action]:
        """Prefill pushes the rest in a second job, which costs it little, for the KV is in its memory by
        then; the first one still gives its token, and a true account of what was cached."""
        if self._now.prefill is _Prefill.DONE or self._now.decode_computes:
            self._now.decode_computes = False
            return [self._compute(push_from_block)]
        self._now.missing = push_from_block
        return []

    def _first(self, event: ev.First, now_s: float) -> list[ev.Action]:
        self._now.prefill = _Prefill.DONE
        self._account(event)
        if self.prompt_logprobs is not None and self.lacks_prompt_logprobs:
            self.prompt_logprobs.take(event.prompt_logprobs, len(self.prompt))
            if self.lacks_prompt_logprobs:
                incomplete = (
                    "prefill gave its token without the logprobs of the whole prompt: run one version"
                )
                return self._failed(Unavailable(incomplete), now_s)
        if not self.generates:
            self._progress(now_s)
            piece = self.answer.end("length")
            self._finish("length", now_s)
            return self._delta(piece.parts, piece.tokens) + self._leave()
        self._keep((event.token,), now_s)
        actions = self._give_out(now_s)
        if self._now.missing is not None and self._runs:
            actions.append(self._compute(self._now.missing))
            self._now.missing = None
        return actions

    def _account(self, event: ev.First) -> None:
        _join(self.instances.prefill, event.instance)
        if self.reuse is None:
            self.reuse = Reuse(
                # The last token of a prompt is always computed, whatever was found.
                cached_tokens=min(event.cached_tokens, len(self.prompt) - 1),
                device_tokens=event.device_tokens,
                dram_tokens=event.dram_tokens,
                disk_tokens=event.disk_tokens,
                queue_us=event.queue_us,
                compute_us=event.compute_us,
                load_wait_us=event.load_wait_us,
            )

    def _accounted(self, event: ev.Event) -> list[ev.Action]:
        """The answer is whole, and only prefill's word may be missing."""
        if self._state is ChoiceState.FAILED or self.done:
            return []
        if isinstance(event, ev.First):
            self._account(event)
        elif isinstance(event, ev.PrefillFailed):
            self._now.account_lost = True
        return self._leave()

    def _prefill_failed(self, error: KVCommonsError, now_s: float) -> list[ev.Action]:
        """Once decode streams without a gap, the end of prefill's call is of no interest."""
        self._now.account_lost = True
        actions = self._give_out(now_s)
        streams = self._now.streaming and not self._now.early
        return actions + self._failed(error, now_s) if self._runs and not streams else actions

    def _keep(self, tokens: Sequence[pb.SampledToken], now_s: float) -> None:
        self._now.heard_s = now_s
        if self._now.held_s is None:
            self._now.held_s = now_s
        for token in tokens:
            if token.position >= len(self.prompt) + len(self.answer.tokens):
                self._now.early[token.position] = token

    def _give_out(self, now_s: float) -> list[ev.Action]:
        """What was kept, and from here on whatever comes in this attempt."""
        if self.lacks_prompt_logprobs:
            return []
        self._now.holds = False
        actions = self._take(now_s)
        if self._now.end is not None and not self.ended:
            actions += self._finished(self._now.end, now_s)
        return actions

    def _take(self, now_s: float) -> list[ev.Action]:
        """The tokens that were kept, as far as there is no gap."""
        parts: list[Part] = []
        shown: list[Shown] = []
        while not self.ended:
            position = len(self.prompt) + len(self.answer.tokens)
            token = self._now.early.pop(position, None)
            if token is None:
                break
            self._progress(now_s)
            piece = self.answer.push(token)
            if piece.reason is None and position + 1 >= self.max_position:
                piece = _joined(piece, self.answer.end("length"))
            parts.extend(piece.parts)
            shown.extend(piece.tokens)
            if piece.reason is not None:
                self._finish(piece.reason, now_s)
        return self._delta(parts, shown) + self._leave()

    def _finished(self, reason: str, now_s: float) -> list[ev.Action]:
        if reason not in ("stop", "length") or self._now.early or not self.answer.tokens:
            return self._failed(
                Unavailable(f"decode ended with {reason!r} before all of its tokens came"), now_s
            )
        piece = self.answer.end(reason)
        assert piece.reason is not None
        self._finish(piece.reason, now_s)
        return self._delta(piece.parts, piece.tokens)

    def _finish(self, reason: str, now_s: float) -> None:
        self._state, self.finish_reason, self._finished_s = ChoiceState.FINISHED, reason, now_s

    def _leave(self) -> list[ev.Action]:
        """The end of the attempt, once it is done."""
        if not self.done:
            return []
        if len(self.answer.kept) == len(self.answer.tokens):
            return [ev.Linger(choice=self.index, attempt=self.attempt)]
        return [ev.Release(choice=self.index, attempt=self.attempt)]  # a stop string: decode goes on

    def _delta(self, parts: Sequence[Part], tokens: Sequence[Shown]) -> list[ev.Action]:
        if not parts and not tokens:
            return []
        return [ev.Delta(choice=self.index, attempt=self.attempt, parts=joined(parts), tokens=tuple(tokens))]

    def _progress(self, now_s: float) -> None:
        self.waits_for = None
        self.resumptions += self._failures > 0
        if self.first_token_s is None:
            self.first_token_s = now_s
        self._stuck_s = None
        self._failures = 0
        self._strikes = 0

    def _refused(self, error: KVCommonsError) -> list[ev.Action]:
        """The next attempt waits in the capacity queue: that is no failure, and takes as long as the request
        may."""
        self.waits_for = error
        return self._again(0.0)

    def _failed(self, error: KVCommonsError, now_s: float) -> list[ev.Action]:
        self._stuck_s = now_s if self._stuck_s is None else self._stuck_s
        self._strikes += self._now.prefill is not _Prefill.QUEUED
        if not isinstance(error, DeadlineExceeded):  # which says nothing of why
            self.waits_for = error
        if isinstance(error, ContextLengthExceeded) and self.answer.tokens:
            return self._cut_short(now_s)
        full = isinstance(error, Overloaded)
        stuck = now_s - self._stuck_s >= self._patience.resume_s and not full
        exhausted = stuck or self._strikes >= self._patience.strikes
        if exhausted or isinstance(error, _FINAL):
            self._state, self.error = ChoiceState.FAILED, error
            return [ev.Release(choice=self.index, attempt=self.attempt)]
        delay_s = 0.0
        if self._failures > 0 or full:
            delay_s = min(_RETRY_DELAY_S_MIN * 2.0**self._failures, _RETRY_DELAY_S_MAX)
        self._failures += 1
        return self._again(delay_s)

    def _cut_short(self, now_s: float) -> list[ev.Action]:
        """No instance can hold the sequence any longer, for whoever lent to it has left: the answer ends as
        it stands."""
        piece = self.answer.end("length")
        self._now.account_lost = True  # nobody computes the prompt any more
        self._finish("length", now_s)
        return self._delta(piece.parts, piece.tokens) + self._leave()

    def _again(self, delay_s: float) -> list[ev.Action]:
        self._state = ChoiceState.RETRYING
        at = {"choice": self.index, "attempt": self.attempt}
        return [ev.Release(**at), ev.Retry(**at, delay_s=delay_s)]


def _join(known: list[str], *instances: str) -> None:
    known += [instance for instance in instances if instance and instance not in known]


def _joined(before: Piece, after: Piece) -> Piece:
    return Piece(parts=before.parts + after.parts, tokens=before.tokens + after.tokens, reason=after.reason)
