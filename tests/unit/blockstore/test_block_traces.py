"""Loads and saves belong to the trace in which they were asked for, although threads of their own do the
work."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import nullcontext

from kvcommons.blockstore.loader import BlockLoader
from kvcommons.blockstore.saver import BlockSaver
from kvcommons.pb import data_pb2 as pb
from kvcommons.telemetry.trace import Tracer
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.server import DataServer, Exchange
from tests.unit.blockstore.dictionary_store import LAYOUT, MODEL, ids


def test_the_callers_trace_reaches_the_store() -> None:
    seen: list[tuple[str | None, str]] = []

    def note(request: pb.DataRequest, exchange: Exchange) -> None:
        seen.append((request.WhichOneof("op"), request.traceparent))
        exchange.reply(pb.DataReply(done=pb.Done()))

    folder = tempfile.mkdtemp(prefix="kvc-")
    server = DataServer(f"unix:{folder}/data", note, name="store")
    server.start()
    loader, saver = BlockLoader(lambda _: None), BlockSaver("w")
    soon = Deadline.after(10)
    with Tracer.off().span("turn") as span:
        load = loader.load(server.address, MODEL, LAYOUT, ids(1), lambda *_: nullcontext([]), soon)
        saver.save(
            address=server.address,
            model=MODEL,
            layers=1,
            tenant="t",
            parent=b"",
            first_index=0,
            block_ids=ids(1),
            layer=0,
            payload=[b"x"],
            done=lambda: None,
        )
    load.wait_all(soon)
    assert saver.flush(soon)
    loader.close()
    saver.close(soon)
    assert server.stop(5)
    shutil.rmtree(folder)
    assert sorted(seen) == [("get_layers", span.traceparent), ("put_layer", span.traceparent)]
