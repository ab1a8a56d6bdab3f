"""A kvstore's data plane over a dictionary, with faults that can be ordered."""

from __future__ import annotations

import threading
from itertools import takewhile

from kvcommons.errors import KVCommonsError
from kvcommons.pb import data_pb2 as pb
from kvcommons.rblock.checksum import checksum
from kvcommons.rblock.layout import Layout
from kvcommons.transport.server import DataServer, Exchange

LAYOUT = Layout(layers=3, kv_heads=2, block_tokens=4, head_dim=8, kv_dtype="float32", query_heads=4)
MODEL = b"m" * 32


def ids(count: int, first: int = 0) -> list[bytes]:
    return [bytes([number]) * 32 for number in range(first, first + count)]


def content(block_id: bytes, layer: int) -> bytes:
    """An object's bytes, of its own for each block and layer."""
    return bytes([block_id[0], layer]) * (LAYOUT.object_bytes // 2)


class DictionaryStore:
    """Keeps objects under (block id, layer). Set the attributes to make it misbehave."""

    def __init__(self, address: str) -> None:
        self.objects: dict[tuple[bytes, int], bytes] = {}
        self.sums: dict[tuple[bytes, int], int] = {}
        self.puts: list[pb.PutLayer] = []
        self.unwanted: set[bytes] = set()
        self.refusal: KVCommonsError | None = None
        self.capacity = 1 << 30  # blocks that it can send at once
        self.asked: list[int] = []  # blocks, by each GetLayers
        self.may_reply = threading.Event()  # replies to GetLayers after layer 0, and to PutLayer, wait for it
        self.may_reply.set()
        self.waiting = 0  # requests whose replies wait for it
        self.server = DataServer(address, self._answer, name="store")
        self.server.start()

    def fill(self, block_ids: list[bytes], layers: range = range(LAYOUT.layers)) -> None:
        for block_id in block_ids:
            for layer in layers:
                self.objects[block_id, layer] = content(block_id, layer)
                self.sums[block_id, layer] = checksum(block_id, layer, content(block_id, layer))

    def _answer(self, request: pb.DataRequest, exchange: Exchange) -> None:
        if self.refusal is not None:
            raise self.refusal
        if request.WhichOneof("op") == "put_layer":
            self._put(request.put_layer, exchange)
            return
        get = request.get_layers
        self.asked.append(len(get.block_ids))
        layers = range(get.first_layer, get.first_layer + get.layers)
        asked = list(get.block_ids)
        while asked:
            there = list(takewhile(lambda one: (one, layers.start) in self.objects, asked))
            piece, asked = asked[: self.capacity], asked[self.capacity :]
            more = 0 < len(piece) < len(there)
            for layer in layers:
                if layer:
                    self.may_reply.wait(5)
                keys = list(takewhile(self.objects.__contains__, ((one, layer) for one in piece)))
                more = more and len(keys) == len(piece)
                got = pb.GotLayer(
                    layer=layer,
                    checksums=[self.sums[key] for key in keys],
                    generations=[7] * len(keys),
                    more=more,
                )
                exchange.reply(pb.DataReply(got_layer=got), [self.objects[key] for key in keys])
            if not more:
                break

    def _put(self, put: pb.PutLayer, exchange: Exchange) -> None:
        keys = [(b, layer) for b in put.block_ids for layer in range(put.layer, put.layer + put.count)]
        into = [bytearray(exchange.payload_bytes // len(keys)) for _ in keys]
        exchange.receive_payload(into)
        self.waiting += 1
        self.may_reply.wait(5)
        self.puts.append(put)
        for key, digest, arrived in zip(keys, put.checksums, into, strict=True):
            if key[0] not in self.unwanted:
                self.objects[key], self.sums[key] = bytes(arrived), digest
        unwanted = [index for index, block_id in enumerate(put.block_ids) if block_id in self.unwanted]
        exchange.reply(pb.DataReply(put_layer=pb.PutLayerReply(unwanted=unwanted)))
