"""Random calls and random bytes at every service's own doors, gRPC and frames, beside a conversation, and
clients of REST that mean ill.

`python -m tests.fault.fuzz --minutes 60 [--seed N]` does so for longer, and says what it saw. Whatever is
sent, no process ends, no call ends with a mistake of the server's, no block stays held, and the sessions that
were there are there; and an honest client is answered in time meanwhile. REST has a tester of its own, too:
tests/system/test_specifications.py.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from kvcommons.errors import KVCommonsError
from kvcommons.pb import (
    data_pb2,
    decode_pb2,
    holder_pb2,
    kvstore_pb2,
    ledger_pb2,
    ledger_pb2_grpc,
    prefill_pb2,
)
from kvcommons.security.authority import TENANTS_KEY
from kvcommons.security.tenants import TenantSigner
from kvcommons.transport import frame
from kvcommons.transport.base import Limits
from tests.contract.transport_peer import connect_raw
from tests.fault.hostile import HostileClients
from tests.machine import scaled
from tests.system.conftest import FLOAT32
from tests.system.stack import Stack

SERVICES = ("prefill", "decode", "attention_pool", "kvstore", "ledger")
CALL_S = scaled(1.0)
ANSWER_S = 0.05  # to a frame; whoever waits for the rest of one does not answer
DEPTH_MAX = 4
SESSIONS = 4
LOOK_CALLS = 200  # after so many it is seen whether all processes live
HONEST_CALLS = 20  # after so many an honest client asks
HONEST_S = scaled(5.0)  # until it has its answer, four tokens
QUESTION = "What is my cat called?"
_INTEGERS = (0, 1, 2, 7, 63, 64, 127, 128, 4096, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
_NUMBERS = (0.0, -1.0, 1.0, 1e-300, 1e300, float("inf"), float("nan"))
_TEXTS = (
    "",
    "a",
    "default",
    "victim",
    "kvcommons-demo",
    "unix:/nowhere",
    "tcp:127.0.0.1:1",
    "x" * 5000,
    "\0",
    "\u202e",
    "a/b",
)
_SIGNED = (
    FieldDescriptor.TYPE_INT32,
    FieldDescriptor.TYPE_INT64,
    FieldDescriptor.TYPE_SINT32,
    FieldDescriptor.TYPE_SINT64,
)
_WIDE = (
    FieldDescriptor.TYPE_INT64,
    FieldDescriptor.TYPE_UINT64,
    FieldDescriptor.TYPE_SINT64,
    FieldDescriptor.TYPE_FIXED64,
)


@dataclass(frozen=True)
class Known:
    """What a peer may have heard: names, addresses, fingerprints and numbers of a real stack. A call that has
    the right ones comes further."""

    texts: list[str] = field(default_factory=list)
    bytes_: list[bytes] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)

    def hear(self, message: Message) -> None:
        for one, value in message.ListFields():
            for each in value if one.is_repeated else (value,):
                if isinstance(each, Message):
                    self.hear(each)
                elif isinstance(each, str):
                    self.texts.append(each)
                elif isinstance(each, bytes):
                    self.bytes_.append(each)
                elif isinstance(each, int):
                    self.numbers.append(int(each))


def random_message(draw: random.Random, known: Known, kind: Descriptor, depth: int = 0) -> Message:
    """Of each field perhaps a value, at a bound or one that is known as often as not."""
    message = GetMessageClass(kind)()
    for one in kind.fields:
        if draw.random() < 0.4:
            continue
        if one.message_type is not None:
            _fill_messages(draw, known, message, one, depth)
        elif one.is_repeated:
            count = draw.choice((0, 1, 1, 2, 3, 3, 70, 1000))
            informed = draw.random() < 0.7
            getattr(message, one.name).extend(_scalar(draw, known, one, informed) for _ in range(count))
        else:
            setattr(message, one.name, _scalar(draw, known, one, draw.random() < 0.7))
    return message


def _fill_messages(
    draw: random.Random, known: Known, message: Message, one: FieldDescriptor, depth: int
) -> None:
    if depth == DEPTH_MAX or one.message_type.GetOptions().map_entry:
        return
    if not one.is_repeated:
        getattr(message, one.name).CopyFrom(random_message(draw, known, one.message_type, depth + 1))
        return
    for _ in range(draw.choice((0, 1, 2, 20)) if depth < 2 else 1):
        getattr(message, one.name).add().CopyFrom(random_message(draw, known, one.message_type, depth + 1))


def _scalar(draw: random.Random, known: Known, one: FieldDescriptor, informed: bool) -> Any:
    if one.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        if one.type == FieldDescriptor.TYPE_BYTES:
            if informed and known.bytes_:
                return draw.choice(known.bytes_)
            return draw.randbytes(draw.choice((0, 1, 8, 16, 32, 4096)))
        return draw.choice(known.texts if informed and known.texts else _TEXTS)
    if one.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return draw.random() < 0.5
    if one.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return draw.choice(_NUMBERS)
    if one.enum_type is not None:
        return draw.choice((*one.enum_type.values_by_number, 99))
    if one.name == "tokens" and informed:  # of a prompt
        return draw.randrange(200)
    bits = 64 if one.type in _WIDE else 32
    if informed and known.numbers:
        return draw.choice(known.numbers) % (1 << (bits - 1))
    value = draw.choice(_INTEGERS) % (1 << (bits - (one.type in _SIGNED)))
    return -value if one.type in _SIGNED and draw.random() < 0.5 else value


def mutated(draw: random.Random, good: bytes) -> bytes:
    """Some bytes changed, cut off, or put twice."""
    data = bytearray(good or b"\0")
    for _ in range(draw.randint(1, 8)):
        at = draw.randrange(len(data))
        match draw.randrange(4):
            case 0:
                data[at] = draw.randrange(256)
            case 1:
                del data[at:]
            case 2:
                data[at:at] = data[at : at + 16]
            case 3:
                data[at] ^= 1 << draw.randrange(8)
        data = data or bytearray(b"\0")
    return bytes(data)


def methods() -> Iterator[MethodDescriptor]:
    for module in (decode_pb2, holder_pb2, kvstore_pb2, ledger_pb2, prefill_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            yield from service.methods


@dataclass
class Fuzz:
    """`begin`, then `run` for a while, then `check`."""

    stack: Stack
    seed: int
    known: Known = field(default_factory=Known)
    outcomes: Counter[str] = field(default_factory=Counter)
    mistakes: list[str] = field(default_factory=list)  # what a service answered that it should not
    sent: deque[str] = field(default_factory=lambda: deque(maxlen=LOOK_CALLS))  # calls since processes lived

    def begin(self) -> None:
        """Sessions that stand in for everybody's, and what each would answer next."""
        self._pids = self._living()
        self._expected: dict[str, tuple[list[int], str]] = {}
        for number in range(SESSIONS):
            session = f"kept-{number}"
            self.stack.client.say(f"My cat is called Zuzu{number}.", session, temperature=0)
            tokens = self.stack.client.session(session)["token_ids"]
            fork = self.stack.client.post(f"/v1/sessions/{session}/fork", {"id": f"fork-{number}"})
            self._expected[session] = (
                tokens,
                self.stack.client.say(QUESTION, fork["id"], temperature=0).text,
            )
        self._channels = {
            name: grpc.insecure_channel(f"unix:{self.stack.runtime / name}.c") for name in SERVICES
        }
        self._signer = TenantSigner.read(self.stack.data / "certificates" / "router" / TENANTS_KEY)
        self._methods = {name: list(methods()) for name in SERVICES}
        watch = ledger_pb2_grpc.LedgerStub(self._channels["ledger"]).Watch(
            ledger_pb2.WatchRequest(), timeout=scaled(10)
        )
        self.known.hear(next(iter(watch)))
        watch.cancel()

    def run(self, until_s: float) -> None:
        draw = random.Random(self.seed)
        number = 0
        while time.monotonic() < until_s:
            name = draw.choice(SERVICES)
            if draw.random() < 0.6:
                self._call(draw, name)
            elif name not in ("prefill", "ledger"):  # they have no data address
                self._send(draw, name)
            number += 1
            if number % LOOK_CALLS == 0:
                self._check_processes()
            if number % HONEST_CALLS == 0:
                self._ask()

    def _ask(self) -> None:
        """As an honest client. Refused is no mistake, for forged instances may be asked; late is one."""
        began_s = time.monotonic()
        try:
            self.stack.client.say("Hello.", None, max_tokens=4)
            outcome = "answered"
        except KVCommonsError as error:
            outcome = f"refused {error.code}"
        took_s = time.monotonic() - began_s
        if took_s > HONEST_S:
            self.mistakes.append(f"an honest client was {outcome} after {took_s:.0f} s")
        self.outcomes[f"rest honest {outcome}"] += 1

    def _call(self, draw: random.Random, name: str) -> None:
        method = draw.choice(self._methods[name])
        path = f"/{method.containing_service.full_name}/{method.name}"
        message = random_message(draw, self.known, method.input_type)
        # What the router alone can do others cannot even try: most calls are made as if by it.
        carried = self._signer.carry(path, message) if draw.random() < 0.7 else None
        request = message.SerializeToString()
        if draw.random() < 0.3:
            request = mutated(draw, request)
        self.sent.append(f"{name} {path} {request.hex()[:400]}")
        channel = self._channels[name]
        call = channel.unary_stream(path) if method.server_streaming else channel.unary_unary(path)
        try:
            answer = call(request, timeout=CALL_S, metadata=() if carried is None else (carried,))
            if method.server_streaming:
                for _, _ in zip(answer, range(3), strict=False):
                    pass
                answer.cancel()
            status = "OK"
        except grpc.RpcError as error:
            found = error.code()
            status = found.name
            if found == grpc.StatusCode.UNIMPLEMENTED and "Method not found" in (error.details() or ""):
                self._methods[name].remove(method)
            elif found in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
                self.mistakes.append(f"{name} {path}: {found.name} {error.details()}: {request.hex()[:400]}")
        self.outcomes[f"{name} {method.name} {status}"] += 1

    def _send(self, draw: random.Random, name: str) -> None:
        """Some frames on a connection of their own, good at first, and then whatever."""
        try:
            raw = connect_raw(f"shm:{self.stack.runtime / name}.d")
        except (OSError, AssertionError) as error:
            self.mistakes.append(f"{name} lets nobody in: {error!r}")
            return
        said = "closed"
        with raw:
            raw.settimeout(ANSWER_S)
            try:
                for _ in range(draw.randint(1, 4)):
                    request = random_message(draw, self.known, data_pb2.DataRequest.DESCRIPTOR)
                    assert isinstance(request, data_pb2.DataRequest)
                    request.deadline_ms = 500
                    head = request.SerializeToString()
                    payload = draw.randbytes(draw.choice((0, 0, 16, 5000)))
                    layer = draw.random() < 0.2
                    sent = frame.pack(len(head), len(payload), Limits(), layer=layer) + head + payload
                    raw.sendall(mutated(draw, sent) if draw.random() < 0.4 else sent)
                    said = "answered" if raw.recv(1 << 16) else "closed"
            except TimeoutError:
                said = "waits"
            except OSError:
                said = "closed"
        self.outcomes[f"{name} frames {said}"] += 1

    def _living(self) -> dict[str, int]:
        return {process.name: process.pid for process in self.stack.processes()}

    def _check_processes(self) -> None:
        """Whoever started a process again hides that it ended: what was sent just before says why."""
        ended = self._pids.items() - self._living().items()
        if ended:
            print(*self.sent, sep="\n", flush=True)
        assert not ended, f"seed {self.seed}: {ended} ended; above is what was called last"

    def check(self) -> None:
        """Asserts that all is as it was. Leases of what was reserved run out first."""
        for channel in self._channels.values():
            channel.close()
        assert self.mistakes == [], f"seed {self.seed}: {self.mistakes[:5]}"
        self._check_processes()
        self.stack.assert_no_block_is_held(wait_s=60.0)
        for session, (tokens, answer) in self._expected.items():
            assert self.stack.client.session(session)["token_ids"] == tokens
            assert self.stack.client.say(QUESTION, session, temperature=0).text == answer
        for path in (self.stack.data / "logs").glob("*.jsonl"):
            for line in path.read_text().splitlines():
                assert "Traceback" not in line, (path.name, line[:2000])


def settings() -> dict[str, dict[str, Any]]:
    """Short leases, so that what a random call reserved is free again soon."""
    return {**FLOAT32, "decode": {**FLOAT32["decode"], "lease_ms": 2000}}


def fuzz(seed: int, seconds: float, folder: Path) -> Fuzz:
    with Stack(folder, tables=settings(), demo=False) as stack:
        run = Fuzz(stack, seed)
        run.begin()
        with HostileClients(stack.url, seed) as clients:
            run.run(time.monotonic() + seconds)
        run.mistakes += clients.mistakes
        run.outcomes += clients.outcomes
        run.check()
    stack.assert_gone()
    return run


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    given = parser.parse_args(arguments)
    print(f"seed {given.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        done = fuzz(given.seed, given.minutes * 60, Path(folder))
    print(json.dumps(dict(sorted(done.outcomes.items())), indent=1))
    print(f"{done.outcomes.total()} calls and connections, 0 mistakes")


if __name__ == "__main__":
    main(sys.argv[1:])
