"""The lease of a session's turn, and the document that the turn may be, as they lie on disk.

docs/formats/session-record.md has their bytes; the rules of who gets a lease are in session.py.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from kvcommons.errors import DataLoss
from kvcommons.pb import kvstore_pb2 as pb
from services.kvstore.folder import UnknownFormat

LEASE_FORMAT = 1
DOCUMENT_LEASE_FORMAT = 2
DOCUMENT_FORMAT = 1
LEASE_MS_MAX = 600_000  # the router's `lease_ms` has the same bound
LEASE_KEPT_MS = 3_600_000  # a lease that ran out may still be committed, if nobody took it

# format, fencing, expires ms, length of turn id, owner; of a document, its state follows on both
_LEASE = struct.Struct("<BQqHH")


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLease:
    """The right to commit the session's next turn.

    `expires_ms` is wall-clock time, so that it survives a restart. `document`: how far it is, of a turn that
    is one; nobody changes it.
    """

    turn_id: str
    owner: str
    fencing: int
    expires_ms: int
    document: pb.DocumentState | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentOnItsWay:
    """A session's lease, which is a document's. `orphaned`: it ran out."""

    tenant: str
    session_id: str
    lease: TurnLease
    orphaned: bool


def under_way(lease: TurnLease | None, now_ms: int) -> bool:
    """Whether a turn holds the session: nobody else may begin one, create it or let it expire."""
    return lease is not None and (lease.document is not None or not has_ended(lease, now_ms))


def has_ended(lease: TurnLease, now_ms: int) -> bool:
    """A lease that would last longer than any may was given by a clock that has been set back since."""
    return not now_ms < lease.expires_ms <= now_ms + LEASE_MS_MAX


def forgotten(lease: TurnLease, now_ms: int) -> bool:
    """Whether a lease ran out so long ago that its turn cannot be committed any more."""
    return lease.document is None and lease.expires_ms + LEASE_KEPT_MS < now_ms


def on_its_way(key: bytes, lease: TurnLease, now_ms: int) -> DocumentOnItsWay:
    """The document of a session's lease, which is one's."""
    tenant, session_id = names_in(key)
    orphaned = has_ended(lease, now_ms)
    return DocumentOnItsWay(tenant=tenant, session_id=session_id, lease=lease, orphaned=orphaned)


def names_in(key: bytes) -> tuple[str, str]:
    """Tenant and session id of a session's key."""
    tenant_end = 2 + int.from_bytes(key[:2], "big")
    return key[2:tenant_end].decode(), key[tenant_end:].decode()


def decode_document(value: bytes) -> pb.Document:
    """Raises UnknownFormat for a document that another version wrote."""
    document = pb.Document.FromString(value)
    if document.format != DOCUMENT_FORMAT:
        raise UnknownFormat(
            f"document of format {document.format}; this version of kvcommons reads {DOCUMENT_FORMAT}"
        )
    return document


def encode_lease(lease: TurnLease) -> bytes:
    turn_id, owner = lease.turn_id.encode(), lease.owner.encode()
    state = lease.document
    form = LEASE_FORMAT if state is None else DOCUMENT_LEASE_FORMAT
    head = _LEASE.pack(form, lease.fencing, lease.expires_ms, len(turn_id), len(owner))
    rest = state.SerializeToString(deterministic=True) if state is not None else b""
    return head + turn_id + owner + rest


def decode_lease(value: bytes) -> TurnLease:
    """Raises UnknownFormat for a lease that another version wrote, DataLoss for bytes that are none."""
    if not value or value[0] not in (LEASE_FORMAT, DOCUMENT_LEASE_FORMAT):
        raise UnknownFormat(
            f"turn lease of an unknown format; this version of kvcommons reads {LEASE_FORMAT} and "
            f"{DOCUMENT_LEASE_FORMAT}"
        )
    try:
        form, fencing, expires, turn_bytes, owner_bytes = _LEASE.unpack_from(value)
        turn_end = _LEASE.size + turn_bytes
        owner_end = turn_end + owner_bytes
        if owner_end > len(value):
            raise struct.error
        is_document = form == DOCUMENT_LEASE_FORMAT
        return TurnLease(
            turn_id=value[_LEASE.size : turn_end].decode(),
            owner=value[turn_end:owner_end].decode(),
            fencing=fencing,
            expires_ms=expires,
            document=pb.DocumentState.FromString(value[owner_end:]) if is_document else None,
        )
    except (struct.error, UnicodeDecodeError, DecodeError):
        raise DataLoss("the lease of the session's turn is damaged: DELETE the session") from None
