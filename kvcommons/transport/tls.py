"""TLS between services on a network: each end shows its service's certificate. A handshake has a deadline,
and the accepting end makes it on the thread that serves the connection, so that one which never ends holds
up nobody else."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Sequence
from typing import cast

from kvcommons.errors import Unavailable, UntrustedPeer
from kvcommons.security.certificate import ServiceCertificate
from kvcommons.security.roles import Role, name_of, names_a_service
from kvcommons.transport.base import Bare
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.framed import Stream
from kvcommons.transport.sockets import SocketStream

HANDSHAKE_S = 5.0  # of a client, at the accepting end
_RECORD_BYTES = 16 << 10  # of TLS; smaller buffers go together


class TlsStream:
    """A Stream over a connected one, which it owns, and whose bytes it seals. Without a socket of its own for
    the native path."""

    proven = True

    def __init__(self, plain: SocketStream, tls: ssl.SSLSocket) -> None:
        """`tls` is on the same connection, by another descriptor: `plain` waits, and is aborted."""
        self._plain = plain
        self._tls = tls

    def send_some(self, views: Sequence[memoryview], deadline: Deadline) -> int:
        sealed: memoryview | bytes = views[0]
        if len(views) > 1 and views[0].nbytes < _RECORD_BYTES:
            sealed = _gathered(views)
        while True:
            try:
                return self._tls.send(sealed)  # one record
            except ssl.SSLWantWriteError:
                self._plain.wait_to_send(deadline)
            except ssl.SSLWantReadError:
                self._plain.wait_to_receive(deadline, "to renew keys with")
            except OSError as error:
                raise self._failed(error) from error

    def receive_some(self, views: Sequence[memoryview], deadline: Deadline) -> int:
        while True:
            try:
                return self._tls.recv_into(views[0])
            except ssl.SSLWantReadError:
                self._plain.wait_to_receive(deadline)
            except ssl.SSLWantWriteError:
                self._plain.wait_to_send(deadline)
            except OSError as error:
                raise self._failed(error) from error

    def finish(self) -> None:
        """Frames say how long they are: nothing is lost where the end is not sealed."""
        self._plain.finish()

    def wait_readable(self, deadline: Deadline) -> bool:
        return bool(self._tls.pending()) or self._plain.wait_readable(deadline)

    def ask_for(self, ask_s: float) -> None:
        self._plain.ask_for(ask_s)

    def bare(self) -> Bare | None:
        return None

    def abort(self) -> None:
        self._plain.abort()

    def close(self) -> None:
        self._tls.close()
        self._plain.close()

    def _failed(self, error: OSError) -> Unavailable:
        """A server says only after the handshake, in TLS 1.3, that it does not take the client's
        certificate."""
        if isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or ""):
            return UntrustedPeer(
                f"{self._plain.peer} does not take this service's certificate: {_said(error)}"
            )
        return self._plain.gone(error)


class TlsTerms:
    """Of the accepting end: the client has to speak first, and to show a service's certificate."""

    def __init__(self, plain: SocketStream, certificate: ServiceCertificate) -> None:
        self._plain = plain
        self._certificate = certificate

    def offer(self) -> bool:
        return True

    def decline(self) -> None:
        raise Unavailable(f"{self._plain.peer} is turned away before its handshake")

    def answered(self, deadline: Deadline) -> Stream | None:
        context = self._certificate.files().server
        tls = _wrapped(self._plain, context)
        try:
            _shake_hands(self._plain, tls, deadline.within(HANDSHAKE_S), "a service")
            shown = tls.getpeercert() or {}
            alternatives = cast(tuple[tuple[str, str], ...], shown.get("subjectAltName", ()))
            names = [value for kind, value in alternatives if kind == "DNS"]
            if not names_a_service(names):
                raise UntrustedPeer(f"the certificate of a {self._plain.peer} is no service's of this stack")
        except BaseException:
            tls.close()
            raise
        return TlsStream(self._plain, tls)

    def close(self) -> None:
        pass


def secure(plain: SocketStream, certificate: ServiceCertificate, role: Role, deadline: Deadline) -> TlsStream:
    """The connecting end's. Raises UntrustedPeer where the other one does not have the role; the socket then
    stays the caller's."""
    tls = _wrapped(plain, certificate.files().client, name_of(role))
    try:
        _shake_hands(plain, tls, deadline, name_of(role))
    except BaseException:
        tls.close()
        raise
    return TlsStream(plain, tls)


def _wrapped(plain: SocketStream, context: ssl.SSLContext, name: str | None = None) -> ssl.SSLSocket:
    """By a descriptor of its own: that of `plain` stays what other threads abort."""
    other = socket.socket(fileno=os.dup(plain.sock.fileno()))
    other.setblocking(False)  # as both are: they share it
    try:
        return context.wrap_socket(
            other, server_side=name is None, do_handshake_on_connect=False, server_hostname=name
        )
    except OSError as error:
        other.close()
        raise plain.gone(error) from error


def _shake_hands(plain: SocketStream, tls: ssl.SSLSocket, deadline: Deadline, wanted: str) -> None:
    """`wanted`: what the other end has to be. Raises UntrustedPeer, Unavailable, DeadlineExceeded."""
    while True:
        try:
            tls.do_handshake()
            return
        except ssl.SSLWantReadError:
            plain.wait_to_receive(deadline, "for the handshake of")
        except ssl.SSLWantWriteError:
            plain.wait_to_send(deadline)
        except ssl.SSLCertVerificationError as error:
            raise UntrustedPeer(
                f"{plain.peer} is not {wanted} of this stack: its certificate says otherwise "
                f"({error.verify_message})"
            ) from error
        except ssl.SSLEOFError as error:
            raise Unavailable(f"{plain.peer} closed the connection in its handshake") from error
        except ssl.SSLError as error:
            raise UntrustedPeer(
                f"{plain.peer} does not make a handshake as services of this stack do ({_said(error)}): "
                "does it have certificates in its settings, of the same authority?"
            ) from error
        except OSError as error:
            raise plain.gone(error) from error


def _said(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()


def _gathered(views: Sequence[memoryview]) -> bytes:
    """What fits into a record, from the front."""
    parts, left = [], _RECORD_BYTES
    for view in views:
        parts.append(view[:left])
        left -= parts[-1].nbytes
        if not left:
            break
    return b"".join(parts)
