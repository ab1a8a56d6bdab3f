"""A process's compiled grammars, and the threads on which they are compiled and masks are computed."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from functools import partial

from kvcommons.errors import (
    DeadlineExceeded,
    Internal,
    InvalidInput,
    KVCommonsError,
    Overloaded,
    Unprocessable,
)
from kvcommons.grammar.compiled import AnswerState, Grammar, Vocabulary

log = logging.getLogger(__name__)

GRAMMARS_MAX = 128  # kept, the least recently used of them dropped
WAITING_MAX = 64  # to be compiled
COMPILE_S = 30.0  # a request waits for its grammar
MASK_S = 2.0  # an iteration waits for a mask: then its sequence ends
# Threads of masks. One computes those of a batch, one after the other, for a job for each would cost as much
# as the mask itself. The others are for what is held up by one that takes longer than this.
_MASK_THREADS = 4
_HELD_UP_S = 0.02
_DRAFTS_S = 0.02  # masks behind drafts may take together: what is not there then is not verified
# A grammar of many rules that refer to each other overflows the usual stack, which would end the process.
# Untouched pages cost nothing.
_STACK_BYTES = 512 << 20
# Of processor time. What takes longer to give its first mask would hold up decode with later ones, too.
_COMPILE_CPU_S = 5.0
_MASK_CPU_S = 0.2


class Grammars:
    """Compiles each text once for each tenant while it is in use: how long one waits tells nobody what others
    ask for. Thread-safe; threads begin with the first grammar."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        """`vocabulary` is read when the first grammar comes, on a thread."""
        self._read = vocabulary
        self._vocabulary: Vocabulary | None = None
        self._kept: OrderedDict[tuple[str, str], Future[Grammar]] = OrderedDict()
        self._lock = threading.Lock()
        self._compiler: ThreadPoolExecutor | None = None
        self._masks: ThreadPoolExecutor | None = None

    def compiling(self, tenant: str, text: str) -> Future[Grammar]:
        """The grammar, now or in a moment. Its exception is InvalidInput for a text that is none."""
        with self._lock:
            found = self._kept.get((tenant, text))
            if found is not None:
                self._kept.move_to_end((tenant, text))
                return found
            self._begin_threads()
            assert self._compiler is not None
            grammar = self._compiler.submit(self._compile, text)
            self._kept[tenant, text] = grammar
            while len(self._kept) > GRAMMARS_MAX:
                self._kept.popitem(last=False)
            return grammar

    async def ready(self, tenant: str, text: str) -> Grammar:
        """As `compiling`, once it is compiled. Raises InvalidInput for a text that is no grammar, Overloaded
        and DeadlineExceeded."""
        with self._lock:
            if sum(not one.done() for one in self._kept.values()) >= WAITING_MAX:
                raise Overloaded("too many grammars wait to be compiled: retry later", retry_after_ms=500)
        compiling = self.compiling(tenant, text)
        if compiling.done():
            return compiling.result()
        try:
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(compiling)), COMPILE_S)
        except TimeoutError:
            raise DeadlineExceeded("the grammar is not compiled yet: simplify it, or retry later") from None

    def constrain(self, tenant: str, text: str, stop_ids: Collection[int], first: int) -> Constraint:
        """Of a sequence whose answer begins with its token `first`, and that one of `stop_ids` ends."""
        grammar = self.compiling(tenant, text)
        assert self._masks is not None
        return Constraint(grammar, self._masks, stop_ids, first)

    def close(self) -> None:
        """Waits for what is under way."""
        with self._lock:
            threads = (self._compiler, self._masks)
        for one in threads:
            if one is not None:
                one.shutdown(cancel_futures=True)

    def _begin_threads(self) -> None:
        if self._compiler is not None:
            return
        self._masks = ThreadPoolExecutor(_MASK_THREADS, thread_name_prefix="grammar-mask")
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammar-compile")
        usual = threading.stack_size(_STACK_BYTES)
        try:
            self._compiler.submit(int)  # which makes its thread
        finally:
            threading.stack_size(usual)

    def _compile(self, text: str) -> Grammar:
        if self._vocabulary is None:
            self._vocabulary = self._read()
        vocabulary = self._vocabulary
        began_s = time.thread_time()
        grammar = vocabulary.compile(text)
        compiled_s = time.thread_time()
        try:
            grammar.begin((vocabulary.eos,)).mask()
        except Unprocessable as error:
            raise InvalidInput(error.message) from None
        masked_s = time.thread_time()
        if compiled_s - began_s > _COMPILE_CPU_S or masked_s - compiled_s > _MASK_CPU_S:
            raise InvalidInput("the grammar takes too long to compute: shorten it, or repeat less in it")
        return grammar


class Constraint:
    """Holds one sequence's answer to its grammar. Its state follows the sequence's tokens, so a sequence that
    goes on elsewhere, or again, goes on where its tokens stand. Belongs to the engine's thread."""

    def __init__(
        self, grammar: Future[Grammar], threads: ThreadPoolExecutor, stop_ids: Collection[int], first: int
    ) -> None:
        """`threads` compute masks, beside the model."""
        self._grammar = grammar
        self._threads = threads
        self._stop_ids = frozenset(stop_ids)
        self._handed = first  # tokens before are known to the state, or no part of the answer
        self._state: AnswerState | None = None
        self._step: _Step | None = None

    def allowed(self, tokens: Sequence[int], drafts: Sequence[int]) -> int:
        """How many of `drafts` the grammar allows behind these tokens of the sequence; none while that is not
        known yet."""
        step = self._step
        if self._state is None or step is None or not step.mask.done() or step.mask.exception():
            return 0
        new = tokens[self._handed :]
        return max(0, self._state.allowed([*new, *drafts]) - len(new))

    def next_step(self, tokens: Sequence[int], drafts: Sequence[int] = ()) -> _Step | None:
        """Computes the masks of what follows these tokens of the sequence, and each of `drafts` behind them;
        None where that has begun, or is about to."""
        new = tuple(tokens[self._handed :])
        if self._step is not None and not new:
            return None
        self._handed += len(new)
        before = None if self._step is None else self._step.mask
        self._step = _Step(self._threads, partial(self._compute, new, before, drafts))
        return self._step

    def mask(self, tokens: Sequence[int], drafts: Sequence[int] = ()) -> bytes:
        """What may follow these tokens and those drafts, which were prepared or are the first of those that
        were. Raises Unprocessable, or Internal, where that cannot be said; behind drafts that tells nothing
        of the answer."""
        prepare_masks([(self, tokens, drafts)])
        assert self._step is not None
        try:
            masks = self._step.result()
        except FutureTimeout:
            raise Unprocessable("the answer's grammar takes too long to compute: simplify it") from None
        except KVCommonsError:
            raise
        except Exception as error:  # of one sequence: those that generate beside it go on
            log.exception("a mask could not be computed")
            raise Internal("the answer's grammar could not be computed; the log says why") from error
        if len(drafts) >= len(masks):
            raise Unprocessable("what follows these drafts is not known")
        return masks[len(drafts)]

    def _compute(
        self, new: Sequence[int], before: Future[list[bytes]] | None, drafts: Sequence[int]
    ) -> list[bytes]:
        if before is not None:
            before.result(MASK_S)  # nothing to wait for but where a mask was not looked at
        if self._state is None:
            self._state = self._grammar.result(COMPILE_S).begin(self._stop_ids)
        self._state.advance(new)
        masks, began_s = [self._state.mask()], time.monotonic()
        for mask in self._state.masks_behind(drafts):
            masks.append(mask)
            if time.monotonic() - began_s > _DRAFTS_S:
                break
        return masks


def prepare_masks(sequences: Iterable[tuple[Constraint, Sequence[int], Sequence[int]]]) -> None:
    """Begins to compute, beside the model, the masks of what follows these tokens of each sequence, and each
    of its drafts behind them."""
    steps = [
        step
        for constraint, tokens, drafts in sequences
        if (step := constraint.next_step(tokens, drafts)) is not None
    ]
    if steps:
        steps[0].threads.submit(_compute_all, steps)


def _compute_all(steps: Iterable[_Step]) -> None:
    for step in steps:
        step.compute()


class _Step:
    """Masks that are computed once, by the thread that comes first: of the next token, and of those behind
    each draft."""

    def __init__(self, threads: ThreadPoolExecutor, compute: Callable[[], list[bytes]]) -> None:
        self.threads = threads
        self.mask: Future[list[bytes]] = Future()
        self._compute = compute
        self._claimed = threading.Lock()  # never released

    def compute(self) -> None:
        if not self._claimed.acquire(blocking=False):
            return
        try:
            self.mask.set_result(self._compute())
        except BaseException as error:
            self.mask.set_exception(error)

    def result(self) -> list[bytes]:
        """Raises what computing it raised, and TimeoutError."""
        with suppress(FutureTimeout):
            return self.mask.result(_HELD_UP_S)
        if not self._claimed.locked():  # one before it takes long
            self.threads.submit(self.compute)
        return self.mask.result(MASK_S)
