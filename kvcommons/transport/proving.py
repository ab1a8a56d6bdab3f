"""How both ends of a connection prove that they have the same token, before its first frame.

Neither says it: each proves it by what the other has drawn. docs/formats/token-greeting.md is the page."""

from __future__ import annotations

import os
import struct

from kvcommons.errors import Unavailable, UntrustedPeer
from kvcommons.security.token import NONCE_BYTES, PROOF_BYTES, SharedToken
from kvcommons.transport import frame
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.framed import Stream
from kvcommons.transport.sockets import SocketStream

MAGIC = b"KVCT"
VERSION = 1
PROVING_S = 5.0  # of a client, at the accepting end
# magic, version, zero
_HEAD = struct.Struct("<4sHH")
_CONNECT, _ACCEPT = b"connect", b"accept"


class TokenTerms:
    """Of the accepting end, which draws first."""

    def __init__(self, plain: SocketStream, token: SharedToken) -> None:
        self._plain = plain
        self._token = token
        self._drawn = os.urandom(NONCE_BYTES)

    def offer(self) -> bool:
        _send(self._plain, self._drawn, Deadline.after(0))
        return True

    def decline(self) -> None:
        raise Unavailable(f"{self._plain.peer} is turned away before it has proved anything")

    def answered(self, deadline: Deadline) -> Stream | None:
        deadline = deadline.within(PROVING_S)
        drawn, proof = _receive(self._plain, NONCE_BYTES, PROOF_BYTES, deadline=deadline)
        if not self._token.proves(proof, _CONNECT, self._drawn, drawn):
            raise UntrustedPeer(f"{self._plain.peer} does not have this stack's token (token_file)")
        _send(self._plain, self._token.prove(_ACCEPT, self._drawn, drawn), deadline)
        return self._plain

    def close(self) -> None:
        pass


def prove(plain: SocketStream, token: SharedToken, deadline: Deadline) -> None:
    """The connecting end's part. Raises UntrustedPeer where the other end does not have the token."""
    (theirs,) = _receive(plain, NONCE_BYTES, deadline=deadline)
    drawn = os.urandom(NONCE_BYTES)
    _send(plain, drawn + token.prove(_CONNECT, theirs, drawn), deadline)
    (proof,) = _receive(plain, PROOF_BYTES, deadline=deadline)
    if not token.proves(proof, _ACCEPT, theirs, drawn):
        raise UntrustedPeer(f"{plain.peer} does not have this stack's token (token_file)")


def _send(plain: SocketStream, said: bytes, deadline: Deadline) -> None:
    left = memoryview(_HEAD.pack(MAGIC, VERSION, 0) + said)
    while left:
        left = left[plain.send_some([left], deadline) :]


def _receive(plain: SocketStream, *sizes: int, deadline: Deadline) -> list[bytes]:
    """Parts of these sizes. Never takes what follows them."""
    said = memoryview(bytearray(_HEAD.size + sum(sizes)))
    have = 0
    while have < len(said):
        # What is no greeting may be shorter than one.
        if have >= _HEAD.size and _HEAD.unpack(said[: _HEAD.size]) != (MAGIC, VERSION, 0):
            break
        count = plain.receive_some([said[have:]], deadline)
        if not count:
            raise Unavailable(
                f"{plain.peer} closed the connection before it had proved that it has the token"
            )
        have += count
    if _HEAD.unpack(said[: _HEAD.size]) != (MAGIC, VERSION, 0):
        begins = bytes(said[:4])
        why = "does not take this service's token" if begins == frame.MAGIC else f"begins with {begins!r}"
        raise UntrustedPeer(
            f"{plain.peer} {why}: set the same token_file in all services of the stack, and run one version"
        )
    parts, start = [], _HEAD.size
    for size in sizes:
        parts.append(bytes(said[start : start + size]))
        start += size
    return parts
