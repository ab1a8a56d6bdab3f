"""Blocks whose bytes follow from their identity, so that any reader can tell whether they are right."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from hashlib import shake_128
from pathlib import Path

from kvcommons.rblock.checksum import checksum
from kvcommons.rblock.heads import HeadPart
from services.kvstore.blocks import BlockStore, BlockStoreSettings
from services.kvstore.incoming import LayerPut
from services.kvstore.medium import Medium
from services.kvstore.tier import BlockShape

# Odd sizes: objects are no whole pages, several layers share one.
SHAPE = BlockShape(model=b"m" * 32, layers=3, object_bytes=5000)
OTHER = BlockShape(model=b"o" * 32, layers=2, object_bytes=20_000)
MIB = 1 << 20


def block_ids(count: int, name: str = "block") -> list[bytes]:
    return [shake_128(f"{name} {number}".encode()).digest(32) for number in range(count)]


def payload(block_id: bytes, layer: int, shape: BlockShape = SHAPE) -> bytes:
    return shake_128(block_id + bytes([layer])).digest(shape.object_bytes)


def content(block_id: bytes, layer: int, shape: BlockShape = SHAPE, heads: HeadPart | None = None) -> bytes:
    """Of some heads (None: of all): their K, then their V."""
    whole = payload(block_id, layer, shape)
    return whole if heads is None else b"".join(heads.pieces([whole]))


def layer_put(
    ids: Sequence[bytes],
    layer: int,
    *,
    writer: str = "writer",
    shape: BlockShape = SHAPE,
    count: int = 1,
    heads: HeadPart | None = None,
) -> LayerPut:
    layers = range(layer, layer + count)
    return LayerPut(
        shape=shape,
        tenant="tenant",
        writer=writer,
        layers=layers,
        parent=b"",
        first_block=0,
        block_ids=ids,
        checksums=[checksum(b, layer, content(b, layer, shape, heads)) for b in ids for layer in layers],
        heads=heads,
    )


def put_layer(store: BlockStore, put: LayerPut) -> list[int]:
    """Sends layers as a connection does; the indices that the store does not want."""
    incoming = store.begin_put(put)
    for block_id, place in zip(put.block_ids, incoming.into, strict=True):
        if place is not None:
            sent = b"".join(content(block_id, layer, put.shape, put.heads) for layer in put.layers)
            for buffer in place:
                buffer[:], sent = sent[: len(buffer)], sent[len(buffer) :]
            assert not sent
    return incoming.finish()


def put_blocks(
    store: BlockStore, ids: Sequence[bytes], *, writer: str = "writer", shape: BlockShape = SHAPE
) -> list[int]:
    """Sends whole blocks layer by layer; the indices that the store did not want of the last layer."""
    unwanted: list[int] = []
    for layer in range(shape.layers):
        unwanted = put_layer(store, layer_put(ids, layer, writer=writer, shape=shape))
    return unwanted


def read_blocks(store: BlockStore, ids: Sequence[bytes], shape: BlockShape = SHAPE) -> int:
    """How many leading blocks the store has in all layers; asserts that their bytes are right."""
    with store.open_run(shape.model, ids) as run:
        for layer in range(shape.layers):
            checksums, _, objects = run.layer(layer, 10)
            for block_id, digest, view in zip(ids, checksums, objects, strict=False):
                assert bytes(view) == payload(block_id, layer, shape)
                assert digest == checksum(block_id, layer, view)
        return len(run)


def open_store(folder: Path, **settings: object) -> BlockStore:
    defaults: dict[str, object] = {"dram_bytes": 4 * MIB, "disk_bytes": 64 * MIB, "put_wait_s": 0.05}
    store = BlockStore(
        Medium.local(folder / "slabs", folder / "index"),
        BlockStoreSettings(**(defaults | settings)),  # type: ignore[arg-type]
    )
    store.start()
    return store


def wait_durable(store: BlockStore, ids: Sequence[bytes], shape: BlockShape = SHAPE) -> int:
    """Waits until the blocks are on disk, or will not get there; how many of the leading ones are."""
    over = threading.Event()
    watch = store.watch(shape.model, ids, over.set)
    over.wait(30)
    store.unwatch(watch)
    return store.durable(shape.model, ids)
