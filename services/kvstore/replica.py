"""How a shard keeps the second copies of its sessions the same: steps in, results out, no I/O and no clock.

Each method is a generator: it yields a step (something to do to the sessions, a call to other shards, a
pause), is sent what came of it, and returns when what it promises holds. Whoever drives it does the I/O:
`shard.py` in the service, the simulation in `tests/simulation`. Several run at once.

The rule that all rests on: whatever this shard says of a session, all shards of its view that hold the
session have acknowledged, in that same view, before it is said. docs/shards.md has the rest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from kvcommons.errors import KVCommonsError, StoreUnavailable, WrongShard
from kvcommons.pb import shards_pb2 as pb
from kvcommons.shards import ShardView, decode_view, encode_view
from services.kvstore.shard_sessions import Page, Sent, ShardSessions
from services.kvstore.stamps import UNSTAMPED, Stamp

T = TypeVar("T")

RETRY_S = 0.1
KNOWN_MAX = 100_000  # sessions whose copies are known to be the same; others are sent whole
BATCH_KEYS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionWork:
    """Work on the sessions, which may block. The driver sends its result, or throws its error."""

    work: Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Requests to other shards, all at once. A list is sent: for each its reply, or None where none came."""

    requests: Sequence[tuple[str, pb.ReplicateRequest | pb.CompareRequest]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleep:
    seconds: float


Step = SessionWork | Call | Sleep
Steps = Generator[Step, Any, T]


class Replica:
    """One shard's part. `changed` is called after another view was adopted."""

    def __init__(self, sessions: ShardSessions, changed: Callable[[], None] = lambda: None) -> None:
        self._sessions = sessions
        self._changed = changed
        self._known: OrderedDict[tuple[str, bytes], Sent] = OrderedDict()  # in this epoch
        self._failed: set[str] = set()  # joiners that missed a change since they were last compared with
        # Set between two steps only; the sessions may be ahead of it for a moment, and refuse what is of this
        # one then.
        self.view: ShardView | None = sessions.view
        # The epoch in which changes need the joiners, too: they may be let in at any moment.
        self._strict_epoch = sessions.synced_epoch

    @property
    def alone(self) -> bool:
        """Nobody has to be asked about anything."""
        view = self.view
        return view is None or (view.alone and view.serving == (self._sessions.name,))

    # ---- what a client asks

    def operate(self, key: bytes, work: Callable[[], T]) -> Steps[T]:
        """Does something with a session; what comes of it, be it an error, is true of all of its copies.

        Raises WrongShard where nothing was done, StoreUnavailable where the view changed in the middle.
        """
        if not self._at_home(key):
            raise WrongShard("another shard has this session: ask that one")
        since = self.view.epoch if self.view is not None else 0
        error: KVCommonsError | None = None
        try:
            result = yield SessionWork(work=work)
        except WrongShard:
            raise
        except KVCommonsError as caught:
            error = caught
        yield from self._confirm(key)
        # Acknowledged is what is here now, which may not have this in it any more.
        if self._sessions.was_elsewhere(key, since):
            raise StoreUnavailable("the session was at another shard for a moment: ask again")
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def look(self, work: Callable[[], T]) -> Steps[T]:
        """Reads of many sessions: true unless this shard was left out of the view before they were read."""
        while True:
            view = self.view
            result = yield SessionWork(work=work)
            if view is None:
                return result  # type: ignore[no-any-return]
            if self._sessions.name not in view.serving:
                raise WrongShard("this shard does not serve now: ask the others")
            others = [name for name in view.serving if name != self._sessions.name]
            replies = yield Call(requests=[(name, self._replicate(view, [])) for name in others])
            if (yield from self._all_heard(view, others, replies)) and self.view == view:
                return result  # type: ignore[no-any-return]

    def _confirm(self, key: bytes) -> Steps[None]:
        """Until all holders of the session have acknowledged its state, as it is now or later."""
        while True:
            view = self.view
            if view is None:
                return
            if not self._at_home(key):
                raise StoreUnavailable("the session has just gone to another shard: ask again")
            others = self._others(view, key)
            if not others or (yield from self._send(view, others, [key])):
                return

    def _send(self, view: ShardView, others: Sequence[str], keys: Sequence[bytes]) -> Steps[bool]:
        """One round: states to shards that hold them all. Whether all who matter have acknowledged."""
        requests: list[tuple[str, pb.ReplicateRequest]] = []
        sent: dict[str, list[tuple[bytes, Sent]]] = {}
        for name in others:
            wanted = [(key, self._known.get((name, key))) for key in keys]
            states = yield SessionWork(work=partial(self._sessions.export, view.epoch, wanted))
            if states is None:
                return False
            requests.append((name, self._replicate(view, [state for state, _ in states])))
            sent[name] = [(state.key, one) for state, one in states]
        replies = yield Call(requests=requests)
        heard = yield from self._all_heard(view, others, replies)
        if self.view != view:
            return False
        for name, reply in zip(others, replies, strict=True):
            if reply is None or reply.HasField("view"):
                continue
            for key, one in sent[name]:
                if key in reply.missing:
                    self._known.pop((name, key), None)
                    heard = False
                else:
                    self._know(name, key, one)
        return heard

    def _all_heard(
        self, view: ShardView, others: Sequence[str], replies: Sequence[pb.ReplicateReply | None]
    ) -> Steps[bool]:
        """Takes newer views from the replies. Whether all who matter acknowledged, in the view of today."""
        for reply in replies:
            newer = decode_view(reply.view) if reply is not None else None
            if newer is not None:
                yield from self.adopt(newer)
        if self.view != view:
            return False
        silent = {
            name
            for name, reply in zip(others, replies, strict=True)
            if reply is None or reply.HasField("view")
        }
        self._failed |= silent & set(view.joining)
        # One that joins is done without, but not once it may be let in at any moment.
        if self._strict_epoch != view.epoch:
            silent -= set(view.joining)
        if silent:
            yield Sleep(seconds=RETRY_S)
        return not silent

    # ---- what another shard asks

    def receive(self, request: pb.ReplicateRequest) -> Steps[pb.ReplicateReply]:
        yield from self._follow(request.view)
        missing = yield SessionWork(work=lambda: self._sessions.apply(request))
        if missing is None:
            return pb.ReplicateReply(view=self._own_view())
        return pb.ReplicateReply(missing=missing)

    def compared(self, request: pb.CompareRequest) -> Steps[pb.CompareReply]:
        yield from self._follow(request.view)
        wanted = yield SessionWork(work=lambda: self._sessions.compare(request))
        if wanted is None:
            return pb.CompareReply(view=self._own_view())
        return pb.CompareReply(wanted=wanted)

    def _follow(self, message: pb.ShardView) -> Steps[None]:
        view = decode_view(message)
        if view is not None:
            yield from self.adopt(view)

    # ---- views

    def adopt(self, view: ShardView) -> Steps[None]:
        """Follows a view, if it is newer than the one before."""
        if self.view is not None and view.epoch <= self.view.epoch:
            return
        if self._is_strange(view):
            return
        adopted = yield SessionWork(work=lambda: self._sessions.adopt(view))
        if adopted and (self.view is None or view.epoch > self.view.epoch):
            self.view = view
            self._known.clear()
            self._failed.clear()
            self._changed()

    def synchronise(self) -> Steps[None]:
        """Until all shards that are to hold sessions of this one have them, or the view changes."""
        view = self.view
        if (
            view is None
            or self._sessions.name not in view.serving
            or self._sessions.synced_epoch == view.epoch
        ):
            return
        if view.settled and not view.joining:
            return
        others = [name for name in view.members if name != self._sessions.name]
        if view.settled:
            others = list(view.joining)
        for name in others:
            while True:
                self._failed.discard(name)
                if (yield from self._bring_up(view, name)):
                    break
                if self.view != view:
                    return
                yield Sleep(seconds=RETRY_S)
        if self._failed or self.view != view:
            return
        # Before it is written down, and so before it is reported: nothing that a joiner misses from here on
        # is said to be done.
        self._strict_epoch = view.epoch
        if (yield SessionWork(work=lambda: self._sessions.mark_synced(view.epoch))):
            self._changed()

    def _bring_up(self, view: ShardView, name: str) -> Steps[bool]:
        """Goes through all of this shard's sessions with another one. Whether it came to the end."""
        start = b""
        while True:
            page: Page = yield SessionWork(work=partial(self._sessions.own_page, start))
            held = [(key, stamp) for key, stamp in page.stamps if name in view.holders(key)]
            compare = pb.CompareRequest(
                view=encode_view(view),
                sender=self._sessions.name,
                start=page.start,
                end=page.end,
                revision=page.revision,
                stamps=[
                    pb.KeyStamp(key=key, stamp=pb.Stamp(epoch=stamp.epoch, revision=stamp.revision))
                    for key, stamp in held
                ],
            )
            (reply,) = yield Call(requests=[(name, compare)])
            if reply is None or reply.HasField("view"):
                if reply is not None:
                    yield from self._follow(reply.view)
                return False
            wanted = list(reply.wanted)
            while wanted:
                if not (yield from self._send(view, [name], wanted[:BATCH_KEYS])) or name in self._failed:
                    return False
                wanted = wanted[BATCH_KEYS:]
            if self.view != view:
                return False
            if not page.end:
                return True
            start = page.end

    def settle(self) -> Steps[None]:
        """Sends the others the changes that nobody waits for: expiry, and what an earlier call did not bring
        over."""
        if self.alone:
            return
        for key in self._sessions.touched():
            view = self.view
            if view is None or not self._at_home(key):
                continue
            stamp = yield SessionWork(work=partial(self._sessions.stamp, key))
            if not all(self._has(view, name, key, stamp) for name in self._others(view, key)):
                try:
                    yield from self._confirm(key)
                except StoreUnavailable:
                    pass  # it is another shard's now

    # ---- within

    def _is_strange(self, view: ShardView) -> bool:
        """Whether a view is of another stack than the sessions here, which would drop them. Not if it leaves
        all to this shard: the operator has put the folder in the place of that stack's."""
        if view.serving == (self._sessions.name,):
            return False
        if self.view is None:
            return self._sessions.count > 0
        return view.stack != self.view.stack

    def _at_home(self, key: bytes) -> bool:
        view = self.view
        return view is None or view.home(key) == self._sessions.name

    def _others(self, view: ShardView, key: bytes) -> list[str]:
        return [name for name in view.holders(key) if name != self._sessions.name]

    def _has(self, view: ShardView, name: str, key: bytes, stamp: Stamp | None) -> bool:
        """Whether another shard has what is here, or joins and is done without."""
        known = self._known.get((name, key))
        if known is not None and known.stamp == (stamp or UNSTAMPED):
            return True
        return name in view.joining and name in self._failed and self._strict_epoch != view.epoch

    def _know(self, name: str, key: bytes, sent: Sent) -> None:
        self._known[name, key] = sent
        self._known.move_to_end((name, key))
        if len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)

    def _replicate(self, view: ShardView, states: Sequence[pb.SessionState]) -> pb.ReplicateRequest:
        return pb.ReplicateRequest(
            view=encode_view(view), sender=self._sessions.name, states=states, fencing=self._sessions.fencing
        )

    def _own_view(self) -> pb.ShardView:
        view = self.view
        return encode_view(view) if view is not None else pb.ShardView()
