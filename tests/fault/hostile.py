"""Clients of REST that mean ill, each on a thread of its own: for tests that look what honest ones have
meanwhile."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import threading
from collections import Counter
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from tests.machine import scaled
from tests.unit.router.test_scan import HOSTILE

KEPT_MAX = 100  # connections of the client that says nothing
PAUSE_S = 0.05
ANSWER_S = scaled(60.0)  # to a body
STREAM = {"messages": [{"role": "user", "content": "Go on."}], "stream": True, "logprobs": True}


class HostileClients:
    """At work in its context. Of the three one reads nothing of its streams, one opens connections and says
    nothing, and one sends bodies that are made to be expensive."""

    def __init__(self, url: str, seed: int) -> None:
        address = urlsplit(url)
        assert address.hostname is not None
        assert address.port is not None
        self._address = (address.hostname, address.port)
        self._seed = seed
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=one, name=one.__name__)
            for one in (self._never_reads, self._says_nothing, self._sends_bodies)
        ]
        self.outcomes: Counter[str] = Counter()  # each name is of one thread
        self.mistakes: list[str] = []

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(2 * ANSWER_S)
            assert not thread.is_alive(), f"{thread.name} waits for an answer without an end"

    def _never_reads(self) -> None:
        """Two streams at a time: the next one takes the place of the first."""
        body = json.dumps(STREAM | {"top_logprobs": 20, "max_tokens": 300}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        kept: list[socket.socket] = []
        while not self._over.wait(1.0):
            with contextlib.suppress(OSError):
                client = socket.socket()
                kept.append(client)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.settimeout(1.0)
                client.connect(self._address)
                client.sendall(head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
                self.outcomes["rest streams that nobody reads"] += 1
            while len(kept) > 2:
                kept.pop(0).close()
        for one in kept:
            one.close()

    def _says_nothing(self) -> None:
        kept: list[socket.socket] = []
        while not self._over.wait(PAUSE_S):
            with contextlib.suppress(OSError):
                kept.append(socket.create_connection(self._address, 1.0))
                self.outcomes["rest connections that say nothing"] += 1
            if len(kept) > KEPT_MAX:
                kept.pop(0).close()
        for one in kept:
            one.close()

    def _sends_bodies(self) -> None:
        draw = random.Random(self._seed)
        names = list(HOSTILE)
        while not self._over.wait(PAUSE_S):
            name = draw.choice(names)
            path = "/v1/completions" if HOSTILE[name].startswith(b'{"prompt"') else "/v1/chat/completions"
            connection = http.client.HTTPConnection(*self._address, timeout=ANSWER_S)
            try:
                connection.request("POST", path, HOSTILE[name], {"Content-Type": "application/json"})
                status = connection.getresponse().status
            except TimeoutError:
                self.mistakes.append(f"{name}: no answer within {ANSWER_S:g} s")
            except (OSError, http.client.HTTPException):  # closed for another connection's sake
                self.outcomes["rest bodies closed"] += 1
            else:
                self.outcomes[f"rest bodies {status}"] += 1
                if status == http.HTTPStatus.INTERNAL_SERVER_ERROR:
                    self.mistakes.append(f"{name}: {status}")
            finally:
                connection.close()
