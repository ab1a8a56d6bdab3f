"""What a kvstore asks of whatever keeps session records."""

from __future__ import annotations

from typing import Protocol

from kvcommons.pb import kvstore_pb2 as pb
from services.kvstore.session import Begun, Committed, Cut, TurnBegin, TurnCommit, TurnRenewal
from services.kvstore.turn_lease import DocumentOnItsWay


class RecordsObserver:
    """Hears what calls cost; this one does nothing."""

    def called(self, call: str, seconds: float) -> None:
        """One has come to its end, well or not."""

    def retried(self, cause: str) -> None:
        """A transaction is done again: for a "conflict" with another one, or since its "connection" broke."""

    def damaged(self, records: int) -> None:
        """So many cannot be read, of those that were looked at."""

    def in_use(self, connections: int) -> None:
        """So many are now."""


class Records(Protocol):
    """Session records and turn leases of all tenants; a tenant sees its own only.

    Every call that changes something is durable when it returns, and each is one step: whatever runs beside
    it comes before it or after it. Every call ends by itself. Raises StoreUnavailable where it could not be
    done in time, and then the change may be there or not: each call may be repeated as it was, and finds out;
    `create`, `fork` and `delete` need an incarnation for that. Raises Overloaded where too many calls wait
    already. A record that cannot be read is DataLoss to calls for its session; `delete` removes it all the
    same, and `page`, `documents` and `sweep` pass over it. On the event loop's thread.
    """

    async def create(
        self, tenant: str, session_id: str, ttl_s: int, incarnation: bytes = b""
    ) -> pb.SessionRecord:
        """A session without a turn; the one that an earlier call with this incarnation made, as it is now.
        Without an incarnation one is drawn. Raises AlreadyExists."""

    async def get(self, tenant: str, session_id: str) -> pb.SessionRecord:
        """The whole record. Raises SessionNotFound."""

    async def page(self, tenant: str, after: str, limit: int) -> tuple[list[pb.SessionRecord], bool]:
        """Heads of a tenant's sessions in the order of their ids' UTF-8 bytes, those behind the id `after`,
        and whether there are more."""

    async def delete(self, tenant: str, session_id: str, incarnation: bytes = b"") -> None:
        """The incarnation is gone, and a turn of it that is under way cannot commit any more; nothing happens
        to another one. Without an incarnation, whichever is there: raises SessionNotFound where none is."""

    async def fork(
        self,
        tenant: str,
        session_id: str,
        new_session_id: str,
        incarnation: bytes = b"",
        cut: Cut | None = None,
    ) -> pb.SessionRecord:
        """A new session with all that this one has committed, or what it had at the `cut`; the incarnation is
        the new one's, as in `create`. Raises SessionNotFound, AlreadyExists, InvalidInput."""

    async def begin(self, tenant: str, session_id: str, turn: TurnBegin) -> Begun:
        """Takes the turn lease, and returns the record. A session that does not exist has version 0 and
        begins with its first commit. Raises TurnInProgress.

        Where the turn that the caller knows is one of this very session, and nothing that the record had then
        is gone from it, the answer may be what came after it.
        """

    async def renew(self, tenant: str, session_id: str, turn: TurnRenewal) -> None:
        """Raises Conflict where another turn has begun, SessionNotFound where the session was deleted. A
        document that comes with it is kept until the turn's end: `begin` gives it to whoever takes the turn
        over."""

    async def commit(self, tenant: str, session_id: str, turn: TurnCommit) -> Committed:
        """Adds the turn and gives its lease back. See `session.commit` for what it raises."""

    async def abandon(self, tenant: str, session_id: str, *, turn_id: str, fencing: int) -> None:
        """Gives the lease back, without a document; nothing happens where it is gone already."""

    async def documents(self, tenant: str = "", session_id: str = "") -> list[DocumentOnItsWay]:
        """Those of all tenants, or of a session, whose lease may have run out: they are on their way until
        they are committed or abandoned, or the session is deleted."""

    async def sweep(self) -> int:
        """Removes some of the expired sessions and forgotten leases; several calls get to all of them.
        Returns how many sessions went."""

    async def count(self) -> int:
        """Sessions that exist, expired ones included until they are swept."""

    async def close(self) -> None:
        """Waits for calls under way; none may follow."""
