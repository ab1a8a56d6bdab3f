"""The sessions of one shard of several: what it tells the other shards, and what it takes from them.

The rules of `docs/shards.md`, each as one step under the sessions' lock, so that no change of view falls into
the middle of one. A shard without company behaves as `Sessions` does and writes the same bytes.
"""

from __future__ import annotations

import heapq
import itertools
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvcommons.pb import kvstore_pb2
from kvcommons.pb import shards_pb2 as pb
from kvcommons.shards import ShardView, decode_view, encode_view, session_key
from services.kvstore import session as rules
from services.kvstore.clock import Clock
from services.kvstore.database import Put, Table
from services.kvstore.families import HEADS, LEASES, META, RECORDS, STAMPS
from services.kvstore.sessions import Sessions
from services.kvstore.stamps import UNSTAMPED, Stamp, StampedTable, decode_row

PAGE_KEYS = 256
ADOPTED_MAX = 64
TOMBSTONE_MS = 3_600_000  # far longer than any message is under way

_NAME_KEY = b"shard"
_FENCING_KEY = b"fencing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A state of a session as another shard has it: enough to send it what came after."""

    stamp: Stamp
    removals: int
    tokens: int
    messages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Some of the keys whose home is here, in order. `end`: where the next page begins; empty: nowhere."""

    start: bytes
    end: bytes
    stamps: Sequence[tuple[bytes, Stamp]]
    revision: int


class ShardSessions(Sessions):
    """`folder` names the data folder, and never changes; `draw` gives each new database a name in it."""

    def __init__(
        self,
        table: Table,
        *,
        folder: str,
        default_ttl_s: int,
        clock: Clock,
        unnamed: Callable[[bytes, Sequence[bytes]], None] = lambda model, block_ids: None,
        draw: Callable[[], str] = lambda: secrets.token_hex(4),
    ) -> None:
        self._stamped = StampedTable(table, clock)
        super().__init__(self._stamped, default_ttl_s=default_ttl_s, clock=clock, unnamed=unnamed)
        self.folder = folder
        self._adopted: deque[ShardView] = deque(maxlen=ADOPTED_MAX)  # since the process started
        self._seen: list[bytes] = []  # by a sweep, and not this shard's to sweep
        self._stamped.name = self.name = f"{folder}.{self._own_name(table, draw)}"

    @staticmethod
    def _own_name(table: Table, draw: Callable[[], str]) -> str:
        """Of this database: one that was begun anew must not pass for the one before."""
        stored = table.get(META, _NAME_KEY)
        if stored is None:
            stored = draw().encode()
            table.write([(META, _NAME_KEY, stored)])
        return stored.decode()

    # ---- views

    @property
    def view(self) -> ShardView | None:
        """The newest that this shard has followed; it survives a restart."""
        return self._stamped.view

    @property
    def synced_epoch(self) -> int:
        return self._stamped.synced_epoch

    def adopt(self, view: ShardView) -> bool:
        """Follows a view, if it is newer; from then on no earlier one."""
        with self._lock:
            if self.view is not None and view.epoch <= self.view.epoch:
                return False
            self._adopted.append(view)  # first: whatever follows from the view may be seen at once
            self._stamped.adopt(view)
            return True

    def was_elsewhere(self, key: bytes, since_epoch: int) -> bool:
        """Whether another shard was the session's home in a view after this one: what was done here before
        may have been replaced by what that one has."""
        later = [view for view in tuple(self._adopted) if view.epoch > since_epoch]
        return len(later) == ADOPTED_MAX or any(view.home(key) != self.name for view in later)

    def mark_synced(self, epoch: int) -> bool:
        """All others have what they need, and will be asked for each change: said before it is reported."""
        with self._lock:
            if self.view is None or self.view.epoch != epoch:
                return False
            self._stamped.synced(epoch)
            return True

    def shard(self) -> pb.Shard:
        """For heartbeats."""
        view = self.view
        return pb.Shard(
            folder=self.folder,
            name=self.name,
            view=encode_view(view) if view is not None else None,
            synced_epoch=self.synced_epoch,
            has_sessions=self.count > 0,
        )

    # ---- what goes to the others

    def stamp(self, key: bytes) -> Stamp | None:
        with self._lock:
            return self._stamped.stamp(key)

    def touched(self) -> list[bytes]:
        """Keys that changed since the last call."""
        with self._lock:
            keys = sorted(self._stamped.touched)
            self._stamped.touched.clear()
            return keys

    def export(
        self, epoch: int, wanted: Sequence[tuple[bytes, Sent | None]]
    ) -> list[tuple[pb.SessionState, Sent]] | None:
        """States of sessions, each for a shard that has `Sent` of it; of one that never was, that it is not.

        None: the view has moved on.
        """
        with self._lock:
            if self.view is None or self.view.epoch != epoch:
                return None
            return [self._export(key, sent) for key, sent in wanted]

    def _export(self, key: bytes, sent: Sent | None) -> tuple[pb.SessionState, Sent]:
        stamp = self._stamped.stamp(key) or UNSTAMPED
        removals = self._stamped.removals[key]
        state = pb.SessionState(
            key=key, stamp=_stamp_message(stamp), lease=self._table.get(LEASES, key) or b""
        )
        value = self._table.get(RECORDS, key)
        if value is not None:
            state.record.ParseFromString(value)
        now = Sent(
            stamp=stamp,
            removals=removals,
            tokens=len(state.record.tokens),
            messages=len(state.record.messages),
        )
        if sent is not None and sent.tokens and value is not None and sent.removals == removals:
            state.base.CopyFrom(_stamp_message(sent.stamp))
            state.kept_tokens, state.kept_messages = sent.tokens, sent.messages
            del state.record.tokens[: sent.tokens]
            del state.record.messages[: sent.messages]
        return state, now

    @property
    def fencing(self) -> int:
        return self._fencing

    def own_page(self, start: bytes) -> Page:
        """The next of the sessions whose home is here, tombstones too."""
        with self._lock:
            own = (key for key in self._keys(start) if self._stamped.is_home(key))
            keys = list(itertools.islice(own, PAGE_KEYS + 1))
            end = keys.pop() if len(keys) > PAGE_KEYS else b""
            stamps = [(key, stamp) for key in keys if (stamp := self._stamped.stamp(key)) is not None]
            return Page(start=start, end=end, stamps=stamps, revision=self._stamped.revision)

    def fork_of(self, record: kvstore_pb2.SessionRecord, new_session_id: str) -> kvstore_pb2.SessionRecord:
        """A new session with all that another one has, wherever that one's home is. Raises AlreadyExists."""
        rules.check_name(new_session_id, "new_id")
        with self._lock:
            self._refuse_taken(record.tenant, new_session_id)
            fork = rules.fork_of(record, new_session_id, self._now_ms())
            key = session_key(record.tenant, new_session_id)
            self._table.write(self._replaced(key, None, fork))
            self._count += 1
            return fork

    # ---- what they tell

    def apply(self, request: pb.ReplicateRequest) -> list[bytes] | None:
        """Takes another shard's states; keys that it has to send whole. None: the view has moved on."""
        with self._lock:
            epoch = self._current(request.view)
            if epoch is None:
                return None
            if request.fencing > self._fencing:
                self._write_step([], request.fencing)
            return [state.key for state in request.states if not self._take(epoch, request.sender, state)]

    def _take(self, epoch: int, sender: str, state: pb.SessionState) -> bool:
        """False: what the state is based on is not here."""
        assert self.view is not None
        if self.view.home(state.key) != sender:
            return True  # nothing of it may be taken, and nothing else would come of sending it again
        key, stamp, local = state.key, _stamp(state.stamp), self._stamped.stamp(state.key)
        # Of this epoch, there are but the sender's states here: an older one comes late.
        if local == stamp or (local is not None and local.epoch == epoch and local > stamp):
            return True
        value = self._table.get(RECORDS, key)
        before = rules.decode_record(value) if value is not None else None
        record = state.record
        if state.HasField("base"):
            if local != _stamp(state.base) or before is None:
                return False
            tokens, messages = list(record.tokens), list(record.messages)
            del record.tokens[:], record.messages[:]
            record.tokens.extend([*before.tokens[: state.kept_tokens], *tokens])
            record.messages.extend([*before.messages[: state.kept_messages], *messages])
        after = record if state.HasField("record") else None
        if local is None and after is None and not state.lease and stamp == UNSTAMPED:
            return True
        lease: Put = (LEASES, key, state.lease or None)
        self._stamped.take(key, stamp, [*self._replaced(key, before, after), lease])
        self._settle(before, after)
        return True

    def compare(self, request: pb.CompareRequest) -> list[bytes] | None:
        """Drops what the sender, whose sessions these are, does not have; keys of what differs.

        None: the view has moved on.
        """
        with self._lock:
            epoch = self._current(request.view)
            if epoch is None:
                return None
            assert self.view is not None
            theirs = {one.key: _stamp(one.stamp) for one in request.stamps}
            as_of = Stamp(epoch, request.revision)
            for key in list(self._keys(request.start)):
                if request.end and key >= request.end:
                    break
                local = self._stamped.stamp(key)
                newer = local is not None and local.epoch == epoch and local > as_of
                if key not in theirs and not newer and self.view.home(key) == request.sender:
                    self._drop(key)
            wanted = []
            for key, stamp in theirs.items():
                local = self._stamped.stamp(key)
                newer = local is not None and local.epoch == epoch and local > stamp
                if local != stamp and not newer:
                    wanted.append(key)
            return wanted

    # ---- upkeep

    def sweep(self) -> int:
        """As that of all sessions, of those whose home is here; and drops what is no longer kept here."""
        self._seen.clear()
        removed = super().sweep()
        seen = [(key, False) for key in self._seen]
        now_ms = self._now_ms()
        tombstones = (
            key for key, row in super()._slice(STAMPS) if decode_row(row)[1] + TOMBSTONE_MS < now_ms
        )
        for key, tombstone in itertools.chain(seen, ((key, True) for key in tombstones)):
            with self._lock:
                if tombstone and self._is_tombstone(key):
                    self._stamped.drop([(STAMPS, key, None)])
                    del self._stamped.removals[key]
                elif not tombstone and self._is_stray(key):
                    self._drop(key)
        return removed

    def _slice(self, family: str) -> list[tuple[bytes, bytes]]:
        """Those whose home is here: what becomes of the others is not for this shard to say."""
        items = super()._slice(family)
        self._seen += [key for key, _ in items if not self._stamped.is_home(key)]
        return [item for item in items if self._stamped.is_home(item[0])]

    def _expired(self, record: kvstore_pb2.SessionRecord, now_ms: int) -> bool:
        """Copies of other shards' sessions are none of this one's to show."""
        key = session_key(record.tenant, record.session_id)
        return not self._stamped.is_home(key) or super()._expired(record, now_ms)

    def _is_stray(self, key: bytes) -> bool:
        """Whether all that is to keep it has it, and this shard is none of them."""
        view = self.view
        if view is None or not view.settled or self.name not in view.serving:
            return False
        return self.name not in view.holders(key)

    def _is_tombstone(self, key: bytes) -> bool:
        if self._table.get(STAMPS, key) is None:
            return False
        return self._table.get(HEADS, key) is None and self._table.get(LEASES, key) is None

    # ---- within; the lock is held

    def _current(self, message: pb.ShardView) -> int | None:
        """The epoch of a message, if it is of the view that this shard follows."""
        view = decode_view(message)
        return view.epoch if view is not None and view == self.view else None

    def _keys(self, start: bytes) -> Iterator[bytes]:
        """All keys from one on, in order, those of tombstones and of leases without a record among them."""
        families = [self._table.items(family, start) for family in (HEADS, LEASES, STAMPS)]
        return (key for key, _ in itertools.groupby(heapq.merge(*families, key=_first), key=_first))

    def _drop(self, key: bytes) -> None:
        value = self._table.get(RECORDS, key)
        before = rules.decode_record(value) if value is not None else None
        puts = self._replaced(key, before, None)
        self._stamped.drop([*puts, (LEASES, key, None), (STAMPS, key, None)])
        self._settle(before, None)

    def _replaced(
        self, key: bytes, before: kvstore_pb2.SessionRecord | None, after: kvstore_pb2.SessionRecord | None
    ) -> list[Put]:
        """Record, head and uses of blocks, from one state to another."""
        old = before.block_ids if before is not None else ()
        uses = self._uses.changes(key, old, after.block_ids if after is not None else ())
        if after is None:
            return [(RECORDS, key, None), (HEADS, key, None), *uses]
        return [
            (RECORDS, key, after.SerializeToString(deterministic=True)),
            (HEADS, key, rules.head_of(after).SerializeToString(deterministic=True)),
            *uses,
        ]

    def _settle(
        self, before: kvstore_pb2.SessionRecord | None, after: kvstore_pb2.SessionRecord | None
    ) -> None:
        self._count += (after is not None) - (before is not None)
        if before is not None and after is None:
            self._uses.released(before.model, before.block_ids)


def _first(item: tuple[bytes, bytes]) -> bytes:
    return item[0]


def _stamp(message: pb.Stamp) -> Stamp:
    return Stamp(message.epoch, message.revision)


def _stamp_message(stamp: Stamp) -> pb.Stamp:
    return pb.Stamp(epoch=stamp.epoch, revision=stamp.revision)
