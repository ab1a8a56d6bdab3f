"""A small client of the router's REST API: standard library only, so that the command line starts at once."""

from __future__ import annotations

import contextlib
import http.client
import json
import shlex
import socket
import ssl
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from devstack.program import program
from kvcommons import errors
from kvcommons.errors import InvalidInput, KVCommonsError, Unauthenticated, Unavailable
from kvcommons.pb import common_pb2 as pb

DEFAULT_URL = "http://127.0.0.1:8000"
ANSWER_S_MAX = 600.0
PROBE_S = 2.0
# X509_V_ERR_HOSTNAME_MISMATCH, _EMAIL_, _IP_ADDRESS_
_OTHER_NAME = (62, 63, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a streamed answer, and when it came (seconds since the request was sent)."""

    text: str
    after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What is known of a streamed turn once it has ended."""

    text: str
    session_id: str
    model: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_s: float
    total_s: float
    timings: Mapping[str, Any]  # the server's own account: milliseconds by part, tokens by tier, who served

    @property
    def tokens_per_s(self) -> float:
        """Of the tokens after the first; 0 where there are none."""
        spent_s = self.total_s - self.ttft_s
        return (self.completion_tokens - 1) / spent_s if self.completion_tokens > 1 and spent_s > 0 else 0.0


class RestClient:
    """One connection a call. Errors of the server arrive as the classes of `kvcommons.errors`; a server that
    cannot be reached is Unavailable."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        api_key: str = "",
        ca: str = "",
        own: str = "",
        timeout_s: float = ANSWER_S_MAX,
    ) -> None:
        """`ca`: a PEM file with the authorities that the server's certificate may be from; default: those of
        the machine. `own`: a PEM file whose first certificate has to be the server's, whatever its name."""
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            host = parts.hostname or ""
            host.encode("idna")
            known = parts.scheme in ("http", "https") and host.isprintable() and " " not in host
            known = known and host != "" and parts.port != 0
        except ValueError:  # brackets, a port or a host's name that are none
            known = False
        if not known:
            raise InvalidInput(f"{url!r} is no address of a server: expected http://HOST:PORT", param="url")
        if not (api_key.isascii() and api_key.isprintable()):  # it has to stand in a header
            raise InvalidInput(
                "the API key has a character that no key has (a line's end?): set KVCOMMONS_API_KEY anew",
                param="api_key",
            )
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._tls = parts.scheme == "https"
        self._ca, self._own = ca, own
        if ca and not self._tls:
            raise InvalidInput(
                f"{url} is called without TLS, where no certificate is checked: write https://",
                param="ca",
            )
        self._trust = _trust(ca) if self._tls and not own else None
        self._host, self._port = host, parts.port
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s

    @property
    def keyed(self) -> bool:
        """Whether it sends an API key."""
        return bool(self._headers)

    @property
    def option(self) -> str:
        """What a command has to be given to talk to the same server; empty where it does by itself."""
        url = "" if self.url == DEFAULT_URL else f" --url {shlex.quote(self.url)}"
        ca = self._ca or self._own
        return url + (f" --ca {shlex.quote(ca)}" if ca else "")

    def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        return self._call("GET", path, None, timeout_s)

    def text(self, path: str, *, timeout_s: float | None = None) -> str:
        """Of an answer that is no JSON: /metrics."""
        return self._ask("GET", path, None, timeout_s).decode(errors="replace")

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._call("POST", path, body, None)

    def delete(self, path: str) -> Any:
        return self._call("DELETE", path, None, None)

    def session(self, session_id: str) -> Any:
        """GET /v1/sessions/{id}. Raises SessionNotFound."""
        return self.get(f"/v1/sessions/{quote(session_id, safe='')}")

    def delete_session(self, session_id: str) -> None:
        self.delete(f"/v1/sessions/{quote(session_id, safe='')}")

    def healthy(self, timeout_s: float = 2.0) -> bool:
        """Whether the server answers and is ready."""
        try:
            self.get("/health", timeout_s=timeout_s)
        except KVCommonsError:
            return False
        return True

    def reachable(self) -> bool:
        """Whether anything listens there."""
        try:
            self._connect(2.0).close()
        except Unavailable:
            return False
        return True

    def chat(self, message: str, session_id: str | None, **parameters: Any) -> Generator[Piece | Turn]:
        """Streams one turn: pieces of text as they come, then the Turn. Close the iterator to stop the
        turn."""
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": message}],
            "stream": True,
            "stream_options": {"include_usage": True},
            **parameters,
        }
        if session_id:
            body["session_id"] = session_id
        started = time.monotonic()
        texts: list[str] = []
        facts: dict[str, Any] = {
            "session_id": session_id or "",
            "model": "",
            "finish_reason": "",
            "usage": {},
            "timings": {},
        }
        ttft_s = 0.0
        for event in self._events("/v1/chat/completions", body):
            after_s = time.monotonic() - started
            for name in ("session_id", "model", "usage", "timings"):
                facts[name] = event.get(name) or facts[name]
            for choice in event.get("choices", []):
                facts["finish_reason"] = choice.get("finish_reason") or facts["finish_reason"]
                text = choice.get("delta", {}).get("content")
                if text:
                    ttft_s = ttft_s or after_s
                    texts.append(text)
                    yield Piece(text=text, after_s=after_s)
        usage = facts["usage"]
        total_s = time.monotonic() - started
        yield Turn(
            text="".join(texts),
            session_id=facts["session_id"],
            model=facts["model"],
            finish_reason=facts["finish_reason"],
            prompt_tokens=usage.get("prompt_tokens", 0),
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
            completion_tokens=usage.get("completion_tokens", 0),
            ttft_s=ttft_s or total_s,
            total_s=total_s,
            timings=facts["timings"],
        )

    def say(self, message: str, session_id: str | None, **parameters: Any) -> Turn:
        """One turn, waited for."""
        for part in self.chat(message, session_id, **parameters):
            if isinstance(part, Turn):
                return part
        raise AssertionError("a chat ends with its Turn")

    def complete(self, prompt: Sequence[int], **parameters: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """A completion of token ids, waited for: its usage and its timings."""
        options = {"include_usage": True}
        body = {"prompt": list(prompt), "stream": True, "stream_options": options, **parameters}
        found: dict[str, Any] = {}
        for event in self._events("/v1/completions", body):
            found |= {name: event[name] for name in ("usage", "timings") if event.get(name)}
        return found["usage"], found["timings"]

    def tokens(self, prompt: Sequence[int], **parameters: Any) -> Iterator[dict[str, Any]]:
        """A completion of token ids, event by event as they come."""
        yield from self._events("/v1/completions", {"prompt": list(prompt), "stream": True, **parameters})

    def events(self, path: str) -> Generator[dict[str, Any]]:
        """Of a stream that is asked for with GET, as they come."""
        yield from self._events(path, None)

    def _events(self, path: str, body: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
        connection = self._connect(None)
        try:
            with self._send(connection, "GET" if body is None else "POST", path, body) as response:
                if response.status != http.client.OK:
                    raise self._refused(response.status, response.read())
                for line in response:
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    event = json.loads(data)
                    if event.keys() == {"error"}:
                        raise _error(response.status, data)
                    yield event
            raise Unavailable(f"the answer of {self.url} ended before it was complete")
        except (OSError, http.client.HTTPException) as error:
            raise self._broken(error) from error
        finally:
            connection.close()

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float | None) -> Any:
        """The object that the server answers. Raises Unavailable where another program listens there."""
        data = self._ask(method, path, body, timeout_s)
        try:
            found = json.loads(data)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise Unavailable(
                f"what answers at {self.url} is no kvcommons: {method} {path} gave no JSON object; is it"
                " the right address?"
            )
        return found

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float | None) -> bytes:
        connection = self._connect(timeout_s)
        try:
            with self._send(connection, method, path, body) as response:
                data = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._broken(error) from error
        finally:
            connection.close()
        if response.status >= http.client.BAD_REQUEST:
            raise self._refused(response.status, data)
        return data

    def _refused(self, status: int, data: bytes) -> KVCommonsError:
        """A server of HTTPS may answer a call without TLS, and say so."""
        return (self._other_scheme() if b"https" in data.lower() else None) or _error(status, data)

    def _broken(self, error: Exception) -> KVCommonsError:
        """Or it ends the connection."""
        ended = isinstance(error, (http.client.BadStatusLine, ConnectionError))
        known = self._other_scheme() if ended else None
        return known or Unavailable(f"the connection to {self.url} broke: {error}")

    def _other_scheme(self) -> Unavailable | None:
        """What to set where the server has TLS and is called without, or the reverse; None where that is not
        so."""
        other = "http" if self._tls else "https"
        try:
            if self._tls:
                plain = http.client.HTTPConnection(self._host, self._port, timeout=PROBE_S)
                with contextlib.closing(plain):
                    plain.request("GET", "/health")
                    if b"https" in plain.getresponse().read().lower():  # it says that it has TLS
                        return None
            else:
                unchecked = ssl.create_default_context()
                unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
                address = self._host, self._port or http.client.HTTPS_PORT
                with socket.create_connection(address, PROBE_S) as connection:
                    unchecked.wrap_socket(connection, server_hostname=self._host).close()
        except (OSError, http.client.HTTPException):
            return None
        serves = "without TLS" if self._tls else "HTTPS"
        url = other + self.url[self.url.index(":") :]
        return Unavailable(f"{self.url} does not answer: it serves {serves}: set --url {url} (KVCOMMONS_URL)")

    def _connect(self, timeout_s: float | None) -> http.client.HTTPConnection:
        connection = self._connection(timeout_s or self._timeout_s)
        try:
            connection.connect()
            if self._own:
                _check_own(connection.sock, self._own)
        except ssl.SSLError as error:
            connection.close()
            raise self._unknown(error) from error
        except OSError as error:
            raise Unavailable(
                f"no server answers at {self.url} ({error}): start one with `{program()} up`"
            ) from error
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _unknown(self, error: ssl.SSLError) -> Unavailable:
        """The server's certificate is not that of whom is meant, or it shows none."""
        reason = getattr(error, "verify_message", "") or getattr(error, "reason", "") or str(error)
        if isinstance(error, ssl.SSLCertVerificationError):
            if error.verify_code in _OTHER_NAME:
                hint = "call it by a name that its certificate has (--url, KVCOMMONS_URL)"
            else:
                hint = (
                    "set --ca (KVCOMMONS_CA) to a PEM file with its authority, or with its own certificate "
                    "if it signed that itself"
                )
        elif (known := self._other_scheme()) is not None:
            return known
        else:
            hint = "name its certificate with --ca (KVCOMMONS_CA)"
        return Unavailable(f"{self.url} is not known to be the server that is meant ({reason}): {hint}")

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        if not self._tls:
            return http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        trust = self._trust
        if trust is None:
            trust = ssl.create_default_context()
            trust.check_hostname = False
            trust.verify_mode = ssl.CERT_NONE  # `_check_own` does
        return http.client.HTTPSConnection(self._host, self._port, timeout=timeout_s, context=trust)

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Mapping[str, Any] | None
    ) -> http.client.HTTPResponse:
        """The response holds the socket, for the connection is for one call: who reads it closes it."""
        data = None if body is None else json.dumps(body).encode()
        headers = {**self._headers, "Connection": "close"}
        if data is not None:
            headers["Content-Type"] = "application/json"
        connection.request(method, path, body=data, headers=headers)
        return connection.getresponse()


def _trust(ca: str) -> ssl.SSLContext:
    """Raises InvalidInput for a file without certificates."""
    try:
        trust = ssl.create_default_context(cafile=ca or None)
    except OSError as error:  # SSLError is one
        raise InvalidInput(
            f"{ca} cannot be used: {error.strerror or error}; name a PEM file with the certificate of the "
            "authority that signed the server's (or with the server's own, if it signed that itself)",
            param="ca",
        ) from error
    trust.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # one that is named is trusted, authority or not
    return trust


def _check_own(connection: socket.socket, path: str) -> None:
    """Raises SSLError where the server's certificate is not the first one of the file."""
    assert isinstance(connection, ssl.SSLSocket)
    try:
        text = Path(path).read_text(encoding="ascii", errors="replace")
        end = text.index(ssl.PEM_FOOTER) + len(ssl.PEM_FOOTER)
        own = ssl.PEM_cert_to_DER_cert(text[text.index(ssl.PEM_HEADER) : end])
    except (OSError, ValueError) as error:
        raise ssl.SSLError(f"{path} has no certificate: {error}") from error
    if connection.getpeercert(binary_form=True) != own:
        raise ssl.SSLError(f"its certificate is not that of {path}")


def _error(status: int, data: bytes) -> KVCommonsError:
    """The error that the server sent in OpenAI's shape; otherwise its status, in words."""
    try:
        found = json.loads(data)["error"]
        detail = pb.ErrorDetail(
            code=found.get("code") or "", message=found.get("message") or "", param=found.get("param") or ""
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        text = data.decode(errors="replace").strip()[:200]
        return Unavailable(
            f"the server answered {status}: {text or http.client.responses.get(status, 'no reason')}"
        )
    error = errors.from_detail(detail)
    if isinstance(error, Unauthenticated):
        return Unauthenticated(f"{error.message} (these commands send what KVCOMMONS_API_KEY has)")
    return error
