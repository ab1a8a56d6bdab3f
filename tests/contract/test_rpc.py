"""The RPC layer over real sockets: errors, deadlines, ids, health, reconnecting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from kvcommons import errors
from kvcommons.pb import ledger_pb2 as pb
from kvcommons.pb import ledger_pb2_grpc as rpc
from kvcommons.rpc.channel import open_channel
from kvcommons.rpc.directory import Heartbeat
from kvcommons.rpc.server import RpcServer, _Interceptor
from kvcommons.telemetry import logs
from kvcommons.telemetry.telemetry import Telemetry
from kvcommons.telemetry.trace import Tracer, current_traceparent, trace_id
from tests.machine import scaled


class Scripted(rpc.LedgerServicer):
    """A servicer whose two methods do what the test says."""

    def __init__(self) -> None:
        self.unary: Callable[[], Any] = lambda: None
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()
        self.left: list[str] = []  # ids of those whose leaving was taken

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatReply:
        self.begun.set()
        try:
            await self.unary()
        finally:
            self.ended.set()
        if request.leaving:
            self.left.append(request.instance.id)
        return pb.HeartbeatReply(heartbeat_ms=7)

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.View]:
        try:
            yield pb.View(revision=1)
            await self.unary()
            yield pb.View(revision=2)
        finally:
            self.ended.set()


class Peer:
    def __init__(self, address: str, *, call_deadline_s: float = 30.0) -> None:
        self.telemetry = Telemetry.off("ledger")
        self.servicer = Scripted()
        self.server = RpcServer(address, self.telemetry, call_deadline_s=call_deadline_s)
        self.server.add(rpc.add_LedgerServicer_to_server, self.servicer)

    async def __aenter__(self) -> Peer:
        await self.server.start()
        self.channel = open_channel(self.server.address)
        self.stub = rpc.LedgerStub(self.channel)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.channel.close(None)
        await self.server.drain(0)

    async def beat(self, timeout_s: float = scaled(30.0)) -> pb.HeartbeatReply:
        return await self.stub.Heartbeat(pb.HeartbeatRequest(), timeout=timeout_s)

    async def counted(self, method: str, code: str) -> float:
        """Calls that ended so. A call is counted once its answer is out: the first may be a moment late."""
        labels = {"method": f"/kvcommons.v1.Ledger/{method}", "code": code}
        async with asyncio.timeout(scaled(10)):
            while not (
                found := self.telemetry.registry.get_sample_value("kvcommons_rpc_calls_total", labels)
            ):
                await asyncio.sleep(0.005)
        return found


@pytest.fixture(params=["unix", "tcp"])
async def peer(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Peer]:
    async with Peer(f"unix:{tmp_path}/s" if request.param == "unix" else "127.0.0.1:0") as peer:
        yield peer


async def collect(call: AsyncIterable[pb.View], revisions: list[int]) -> None:
    async for view in call:
        revisions.append(view.revision)


async def failing(error: Exception) -> None:
    raise error


async def test_errors_cross_as_the_class_they_are(peer: Peer) -> None:
    for code, (cls, *_) in errors._TABLE.items():
        raised = cls(f"wrong: {code} ∎", param="p", retry_after_ms=9)
        peer.servicer.unary = lambda raised=raised: failing(raised)  # type: ignore[misc]
        with pytest.raises(errors.KVCommonsError) as caught:
            await peer.beat()
        assert type(caught.value) is cls
        assert (caught.value.message, caught.value.param, caught.value.retry_after_ms) == (
            raised.message, "p", 9,
        )  # fmt: skip
        assert await peer.counted("Heartbeat", code) == 1


async def test_errors_in_the_middle_of_a_stream(peer: Peer) -> None:
    peer.servicer.unary = lambda: failing(errors.StaleEpoch("gone"))
    seen: list[int] = []
    with pytest.raises(errors.StaleEpoch, match="gone"):
        await collect(peer.stub.Watch(pb.WatchRequest(), timeout=scaled(30)), seen)
    assert seen == [1]
    assert await peer.counted("Watch", "stale_epoch") == 1


@pytest.mark.parametrize("method", ["Heartbeat", "Watch"])
async def test_bytes_that_are_no_message_are_the_callers_mistake(peer: Peer, method: str) -> None:
    path = f"/kvcommons.v1.Ledger/{method}"
    call: Any = getattr(peer.channel, "unary_unary" if method == "Heartbeat" else "unary_stream")(path)
    answer = call(b"\x0a\xff", timeout=scaled(30))
    with pytest.raises(errors.InvalidInput, match="no message of that method"):
        await (answer if method == "Heartbeat" else collect(answer, []))
    assert await peer.counted(method, "invalid_value") == 1
    assert not peer.servicer.begun.is_set()


async def test_the_unexpected_is_logged_and_its_traceback_stays_at_home(
    peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    peer.servicer.unary = lambda: failing(ZeroDivisionError("secret detail"))
    with pytest.raises(errors.Internal) as caught:
        await peer.beat()
    assert "secret" not in caught.value.message
    assert "ZeroDivisionError" in caplog.text
    peer.servicer.unary = lambda: failing(errors.Internal("x" * 100_000))
    with pytest.raises(errors.Internal, match=r"^x{1500}…$"):
        await peer.beat()


async def test_deadlines(peer: Peer) -> None:
    peer.servicer.unary = lambda: asyncio.sleep(0)
    await peer.beat()  # connected: what follows reaches the server before its deadline, as a rule
    peer.servicer.begun.clear()
    peer.servicer.ended.clear()
    peer.servicer.unary = lambda: asyncio.sleep(scaled(60))
    async with asyncio.timeout(scaled(10)):
        while not peer.servicer.begun.is_set():
            with pytest.raises(errors.DeadlineExceeded):
                await peer.beat(timeout_s=scaled(0.1))
        await peer.servicer.ended.wait()
    peer.servicer.ended.clear()
    seen: list[int] = []
    async with asyncio.timeout(scaled(10)):
        while not seen:
            with pytest.raises(errors.DeadlineExceeded):
                await collect(peer.stub.Watch(pb.WatchRequest(), timeout=scaled(0.2)), seen)
        await peer.servicer.ended.wait()
    assert seen == [1]
    assert await peer.counted("Watch", "deadline_exceeded") >= 1


@pytest.mark.parametrize(("after_s", "code"), [(9.5, "deadline_exceeded"), (5.0, "cancelled")])
async def test_a_callers_deadline_ends_a_moment_before_the_one_here(
    monkeypatch: pytest.MonkeyPatch, after_s: float, code: str
) -> None:
    context = SimpleNamespace(invocation_metadata=lambda: (), time_remaining=lambda: 10.0)
    times = iter([0.0, after_s, after_s])
    monkeypatch.setattr("kvcommons.rpc.server.time", SimpleNamespace(monotonic=lambda: next(times)))
    telemetry = Telemetry(
        service="test", instance_id="test", registry=CollectorRegistry(), tracer=Tracer.off()
    )
    with pytest.raises(asyncio.CancelledError):
        async with _Interceptor(telemetry, 60.0)._call("/a/B", bytes, b"", context):  # type: ignore[arg-type]
            raise asyncio.CancelledError
    labels = {"method": "/a/B", "code": code}
    assert telemetry.registry.get_sample_value("kvcommons_rpc_calls_total", labels) == 1


async def test_a_call_without_a_deadline_is_refused_here_and_bounded_there(tmp_path: Path) -> None:
    async with Peer(f"unix:{tmp_path}/s", call_deadline_s=0.1) as peer:
        with pytest.raises(AssertionError, match="Heartbeat was called without a timeout"):
            await peer.stub.Heartbeat(pb.HeartbeatRequest())
        peer.servicer.unary = lambda: asyncio.sleep(60)
        async with grpc.aio.insecure_channel(peer.server.address) as foreign:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await rpc.LedgerStub(foreign).Heartbeat(pb.HeartbeatRequest())
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            call = rpc.LedgerStub(foreign).Watch(pb.WatchRequest())
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call:
                    pass
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_caller_that_leaves_ends_the_handler(peer: Peer) -> None:
    peer.servicer.unary = lambda: asyncio.sleep(60)
    call = peer.stub.Watch(pb.WatchRequest(), timeout=scaled(60))
    async for _ in call:
        break
    call.cancel()
    async with asyncio.timeout(scaled(10)):
        await peer.servicer.ended.wait()
    peer.servicer.ended.clear()
    task = asyncio.create_task(peer.beat(60))
    async with asyncio.timeout(scaled(10)):
        await peer.servicer.begun.wait()
    task.cancel()
    async with asyncio.timeout(scaled(10)):
        await peer.servicer.ended.wait()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_iterating_a_call_that_someone_cancels_is_an_error_not_a_cancellation(peer: Peer) -> None:
    peer.servicer.unary = lambda: asyncio.sleep(60)
    call = peer.stub.Watch(pb.WatchRequest(), timeout=scaled(60))

    async def consume() -> None:
        async for _ in call:
            asyncio.get_running_loop().call_later(0.05, call.cancel)

    with pytest.raises(errors.Unavailable):
        await asyncio.wait_for(consume(), scaled(5))


async def test_ids_travel(peer: Peer) -> None:
    seen = {}

    async def look() -> None:
        seen.update(
            request=logs.request_id.get(),
            session=logs.session_id.get(),
            trace=trace_id(current_traceparent()),
        )

    peer.servicer.unary = look
    with logs.bound(request_id="r-1", session_id="sitzung ∎"), Tracer.off().span("turn") as span:
        await peer.beat()
        assert seen == {"request": "r-1", "session": "sitzung ∎", "trace": trace_id(span.traceparent)}
        seen.clear()
        async for _ in peer.stub.Watch(pb.WatchRequest(), timeout=scaled(30)):
            pass
        assert seen == {"request": "r-1", "session": "sitzung ∎", "trace": trace_id(span.traceparent)}
    await peer.beat()
    assert seen == {"request": "", "session": "", "trace": ""}  # a heartbeat belongs to no request


async def test_large_messages_pass(peer: Peer) -> None:
    async def nothing() -> None:
        pass

    peer.servicer.unary = nothing
    instance = pb.Instance(id="x" * (20 << 20))
    reply = await peer.stub.Heartbeat(pb.HeartbeatRequest(instance=instance), timeout=scaled(20))
    assert reply.heartbeat_ms == 7


async def test_health_follows_readiness(peer: Peer) -> None:
    stub = health_pb2_grpc.HealthStub(peer.channel)

    async def status(service: str) -> int:
        request = health_pb2.HealthCheckRequest(service=service)
        return (await stub.Check(request, timeout=scaled(10))).status

    answer = health_pb2.HealthCheckResponse
    assert await status("") == await status("ledger") == answer.NOT_SERVING
    await peer.server.set_ready(True)
    assert await status("") == await status("ledger") == answer.SERVING
    await peer.server.set_ready(False)
    assert await status("") == answer.NOT_SERVING
    with pytest.raises(errors.NotFound):
        await status("unheard of")
    watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=scaled(10))
    seen = []
    async for update in watch:
        seen.append(update.status)
        if len(seen) == 2:
            break
        await peer.server.set_ready(True)
    watch.cancel()
    assert seen == [answer.NOT_SERVING, answer.SERVING]


async def test_drain_lets_calls_end_and_cancels_what_is_left(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with Peer(f"unix:{path}") as peer:
        peer.servicer.unary = lambda: asyncio.sleep(0.3)
        short = asyncio.create_task(peer.beat())
        async with asyncio.timeout(scaled(10)):
            await peer.servicer.begun.wait()
        await peer.server.drain(scaled(10))
        assert (await short).heartbeat_ms == 7
        assert not path.exists()
    async with Peer(f"unix:{path}") as peer:
        peer.servicer.unary = lambda: asyncio.sleep(60)
        long = asyncio.create_task(peer.beat())
        async with asyncio.timeout(scaled(10)):
            await peer.servicer.begun.wait()
        await peer.server.drain(0.1)
        with pytest.raises(errors.Unavailable):
            await long


async def test_a_peer_that_is_gone_is_tried_again_every_second(tmp_path: Path) -> None:
    """However long it is gone. gRPC's own pauses grow to two minutes: 43 s before the tenth attempt."""
    attempts: list[float] = []
    loop = asyncio.get_running_loop()

    def end(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        attempts.append(loop.time())
        writer.close()

    server = await asyncio.start_unix_server(end, f"{tmp_path}/s")
    channel = open_channel(f"unix:{tmp_path}/s")
    try:
        while len(attempts) < 10:
            with pytest.raises(errors.Unavailable):
                await rpc.LedgerStub(channel).Heartbeat(pb.HeartbeatRequest(), timeout=scaled(20))
            await asyncio.sleep(0.05)
    finally:
        await channel.close(None)
        server.close()
    assert max(later - earlier for earlier, later in pairwise(attempts)) < scaled(3)


async def test_a_peer_that_comes_back_is_found_soon(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    channel = open_channel(address)
    stub = rpc.LedgerStub(channel)

    async def nothing() -> None:
        pass

    try:
        loop = asyncio.get_running_loop()
        for _ in range(2):
            began = loop.time()
            while loop.time() < began + 1.5:  # long enough for a backoff to grow past its bound
                with pytest.raises(errors.Unavailable):
                    await stub.Heartbeat(pb.HeartbeatRequest(), timeout=scaled(10))
                await asyncio.sleep(0.1)
            async with Peer(address) as peer:
                peer.servicer.unary = nothing
                deadline = loop.time() + scaled(10)
                while True:
                    try:
                        await stub.Heartbeat(pb.HeartbeatRequest(), timeout=scaled(10))
                        break
                    except errors.Unavailable:
                        assert loop.time() < deadline
                        await asyncio.sleep(0.05)
    finally:
        await channel.close(None)


async def test_who_leaves_tells_the_next_ledger_where_one_does_not_take_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing() -> None:
        pass

    monkeypatch.setattr("kvcommons.rpc.directory.BEAT_TIMEOUT_S", scaled(10.0))
    async with Peer(f"unix:{tmp_path}/a") as a, Peer(f"unix:{tmp_path}/b") as b:
        a.servicer.unary = b.servicer.unary = nothing
        heartbeat = Heartbeat([a.server.address, b.server.address], lambda: pb.Instance(id="decode-1"))
        heartbeat.start()
        heard = [asyncio.create_task(peer.servicer.ended.wait()) for peer in (a, b)]
        await asyncio.wait(heard, timeout=scaled(20), return_when=asyncio.FIRST_COMPLETED)
        late, other = (a, b) if a.servicer.ended.is_set() else (b, a)
        assert late.servicer.ended.is_set()
        late.servicer.unary = lambda: failing(errors.DeadlineExceeded("held up"))
        await heartbeat.stop()
        assert (late.servicer.left, other.servicer.left) == ([], ["decode-1"])
        for task in heard:
            task.cancel()


async def test_an_address_in_use_is_a_clear_error(tmp_path: Path) -> None:
    async with Peer("127.0.0.1:0") as peer:
        other = RpcServer(peer.server.address, Telemetry.off("other"))
        with pytest.raises(errors.Unavailable, match="cannot be bound"):
            await other.start()
    nowhere = RpcServer(f"unix:{tmp_path}/no/s", Telemetry.off("other"))
    with pytest.raises(errors.Unavailable, match="does its directory exist"):
        await nowhere.start()
