"""The data plane: layers of blocks in and out, on a blocking thread per connection.

Payloads go from the socket into DRAM slots and from DRAM slots to the socket; nothing is copied in between.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import closing

from kvcommons.errors import InvalidInput, UnsupportedParameter
from kvcommons.pb import data_pb2 as pb
from kvcommons.rblock.heads import HeadPart
from kvcommons.telemetry.telemetry import Telemetry
from kvcommons.transport.server import Exchange
from services.kvstore.blocks import BlockStore
from services.kvstore.incoming import LayerPut, check_run
from services.kvstore.run import Run
from services.kvstore.tier import BlockShape

BLOCKS_MAX = 65_536  # of one request
ID_BYTES = 32


class DataHandler:
    """Answers PutLayer and GetLayers."""

    def __init__(self, store: BlockStore, telemetry: Telemetry) -> None:
        self._store = store
        self._tracer = telemetry.tracer

    def __call__(self, request: pb.DataRequest, exchange: Exchange) -> None:
        if not request.traceparent:
            self._answer(request, exchange)
            return
        op = request.WhichOneof("op")
        with self._tracer.span(f"kvstore.{op}", parent=request.traceparent, kind="server"):
            self._answer(request, exchange)

    def _answer(self, request: pb.DataRequest, exchange: Exchange) -> None:
        op = request.WhichOneof("op")
        if op == "put_layer":
            self._put_layer(request.put_layer, exchange)
        elif op == "get_layers":
            self._get_layers(request.get_layers, exchange)
        else:
            raise UnsupportedParameter(f"a kvstore does not answer {op}: it is for holders", param="op")

    def _put_layer(self, put: pb.PutLayer, exchange: Exchange) -> None:
        _check_ids(put.model, put.block_ids)
        if not put.layers:
            raise InvalidInput(
                "layers is not set: the store cannot tell when a block is complete", param="layers"
            )
        count = put.count or 1
        objects = len(put.block_ids) * count
        if exchange.payload_bytes == 0 or exchange.payload_bytes % objects:
            raise InvalidInput(
                f"{exchange.payload_bytes} bytes are no whole objects for {len(put.block_ids)} blocks"
            )
        heads = HeadPart.of(put.heads) if put.HasField("heads") else None
        sent_bytes = exchange.payload_bytes // objects
        object_bytes = sent_bytes * (1 if heads is None else heads.parts)
        if heads is not None and sent_bytes % 2:
            raise InvalidInput(f"{sent_bytes} bytes of heads are no K and V of one size", param="heads")
        shape = BlockShape(model=put.model, layers=put.layers, object_bytes=object_bytes)
        incoming = self._store.begin_put(
            LayerPut(
                shape=shape,
                tenant=put.tenant,
                writer=put.writer,
                layers=range(put.layer, put.layer + count),
                parent=put.parent,
                first_block=put.first_block,
                block_ids=list(put.block_ids),
                checksums=list(put.checksums),
                heads=heads,
            )
        )
        try:
            if any(buffers is not None for buffers in incoming.into):
                waste = [memoryview(bytearray(count * sent_bytes))] if None in incoming.into else []
                exchange.receive_payload([each for buffers in incoming.into for each in buffers or waste])
        except BaseException:
            incoming.break_off()
            raise
        unwanted = incoming.finish()
        exchange.reply(pb.DataReply(put_layer=pb.PutLayerReply(unwanted=unwanted)))

    def _get_layers(self, get: pb.GetLayers, exchange: Exchange) -> None:
        _check_ids(get.model, get.block_ids)
        if not get.layers:
            raise InvalidInput("layers is 0: nothing is asked for", param="layers")
        heads = HeadPart.of(get.heads) if get.HasField("heads") else None
        layers, ids = range(get.first_layer, get.first_layer + get.layers), list(get.block_ids)
        with closing(self._runs(get.model, ids, layers)) as runs:
            for run in runs:
                for piece in run.pieces():
                    self._send_piece(run, piece, layers, heads, exchange)

    def _runs(self, model: bytes, ids: list[bytes], layers: range) -> Generator[Run]:
        """One behind another, each open until the next is asked for. While one is sent the next is read, as
        far as DRAM has room for both."""

        def behind() -> Run:
            return self._store.open_run(model, ids, layers.start, layers[-1], continues=True)

        run, next_run = self._store.open_run(model, ids, layers.start, layers[-1]), None
        try:
            while True:
                ids = ids[len(run) :]
                next_run = behind() if run.more else None
                yield run
                run.close()
                if next_run is None or not run.more:  # what was sent may have ended it
                    return
                if not len(next_run):
                    next_run = behind()
                run, next_run = next_run, None
        finally:
            run.close()
            if next_run is not None:
                next_run.close()

    def _send_piece(
        self, run: Run, piece: range, layers: range, heads: HeadPart | None, exchange: Exchange
    ) -> None:
        for layer in layers:
            checksums, generations, objects = run.layer(layer, exchange.deadline.left(), heads, piece)
            reply = pb.GotLayer(
                layer=layer,
                checksums=checksums,
                generations=generations,
                more=run.more_behind(piece),
            )
            exchange.reply(pb.DataReply(got_layer=reply), objects)
            self._store.sent(sum(len(part) for part in objects))


def _check_ids(model: bytes, block_ids: Iterable[bytes]) -> None:
    ids = list(block_ids)
    if not model or len(model) > ID_BYTES:
        raise InvalidInput(f"a model fingerprint has 1 to {ID_BYTES} bytes", param="model")
    if not ids or len(ids) > BLOCKS_MAX:
        raise InvalidInput(f"a request names 1 to {BLOCKS_MAX} blocks", param="block_ids")
    if any(len(block_id) != ID_BYTES for block_id in ids):
        raise InvalidInput(f"a block identity has {ID_BYTES} bytes", param="block_ids")
    check_run(ids)
