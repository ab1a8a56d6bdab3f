"""What both ends of a connection say that know each other by a token."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcommons.errors import UntrustedPeer
from kvcommons.security.token import CALL_S, CallProofs, SharedToken
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.proving import TokenTerms, prove
from kvcommons.transport.sockets import SocketStream

GOLDEN = (Path(__file__).parents[2] / "golden/token-greeting.bin").read_bytes()
TOKEN = SharedToken(b"a token of this very stack")
SIZES = (24, 56, 40)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The accepting end draws first."""
    draws = iter((bytes(range(16)), bytes(range(16, 32))))
    monkeypatch.setattr(os, "urandom", lambda size: next(draws))


@pytest.fixture
def ends() -> Iterator[tuple[SocketStream, SocketStream]]:
    streams = [SocketStream(sock, "peer") for sock in socket.socketpair()]
    yield streams[0], streams[1]
    for stream in streams:
        stream.close()


@pytest.mark.usefixtures("drawn")
def test_greetings_have_the_documented_bytes(ends: tuple[SocketStream, SocketStream]) -> None:
    accepting, theirs = ends
    terms, deadline = TokenTerms(accepting, TOKEN), Deadline.after(5)
    first, second, third = (GOLDEN[sum(SIZES[:n]) : sum(SIZES[: n + 1])] for n in range(3))
    assert sum(SIZES) == len(GOLDEN)
    terms.offer()
    assert theirs.sock.recv(100) == first
    theirs.sock.send(second)
    assert terms.answered(deadline) is accepting
    assert theirs.sock.recv(100) == third


def test_both_ends_find_the_other_to_have_it(ends: tuple[SocketStream, SocketStream]) -> None:
    accepting, connecting = ends
    terms, deadline = TokenTerms(accepting, TOKEN), Deadline.after(5)
    answering = threading.Thread(target=lambda: (terms.offer(), terms.answered(deadline)))
    answering.start()
    prove(connecting, TOKEN, deadline)
    answering.join()
    connecting.send_some([memoryview(b"frame")], deadline)
    assert accepting.sock.recv(100) == b"frame"


def test_an_end_that_listens_with_another_token_is_told_nothing(
    ends: tuple[SocketStream, SocketStream],
) -> None:
    accepting, connecting = ends
    deadline = Deadline.after(5)
    # It cannot make the last proof, so it repeats the client's own.
    accepting.sock.send(GOLDEN[:24])

    def reflect() -> None:
        said = accepting.sock.recv(100)
        accepting.sock.send(said[:8] + said[24:])

    accepting.sock.setblocking(True)
    reflecting = threading.Thread(target=reflect)
    reflecting.start()
    with pytest.raises(UntrustedPeer, match="does not have this stack's token"):
        prove(connecting, TOKEN, deadline)
    reflecting.join()


def test_what_was_said_on_one_connection_is_of_no_use_on_another(
    ends: tuple[SocketStream, SocketStream],
) -> None:
    accepting, theirs = ends
    terms = TokenTerms(accepting, TOKEN)
    terms.offer()
    theirs.sock.send(GOLDEN[24:80])  # right once, for another draw
    with pytest.raises(UntrustedPeer, match="does not have this stack's token"):
        terms.answered(Deadline.after(5))


def test_calls_proofs_are_remembered_for_as_long_as_they_are_good(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1e9
    proofs = CallProofs(TOKEN, ("ledger",), clock=lambda: now_s)
    first = TOKEN.prove_call("/m", "ledger", now_s)
    proofs.check("/m", first)
    for late_s in (0.0, CALL_S, CALL_S + 1, 3 * CALL_S):
        now_s = 1e9 + late_s
        proofs.check("/m", TOKEN.prove_call("/m", "ledger", now_s))
        with pytest.raises(UntrustedPeer, match=r"made before|set the clocks"):
            proofs.check("/m", first)
    assert len(proofs._seen) < 4
    # More than can be remembered: what is forgotten is refused all the same.
    monkeypatch.setattr("kvcommons.security.token._SEEN_MAX", 8)
    said = []
    for _ in range(20):
        now_s += 0.01
        said.append(TOKEN.prove_call("/m", "ledger", now_s))
        proofs.check("/m", said[-1])
    assert len(proofs._seen) <= 9
    for proof in said:
        with pytest.raises(UntrustedPeer, match=r"made before|set the clocks"):
            proofs.check("/m", proof)


@pytest.mark.parametrize("carried", [b"", b"short", bytes(32), bytes(70)])
def test_what_is_no_proof_is_refused(carried: bytes) -> None:
    with pytest.raises(UntrustedPeer, match="does not have this stack's token"):
        CallProofs(TOKEN, ("ledger",)).check("/m", carried)
