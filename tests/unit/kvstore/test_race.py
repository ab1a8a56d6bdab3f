"""Many writers and readers at once on a store with little room: every byte served is right, nothing leaks."""

from __future__ import annotations

import random
import threading
import time
from functools import partial
from pathlib import Path

from services.kvstore.blocks import BlockStore
from services.kvstore.tier import BlockShape
from tests.machine import scaled
from tests.unit.kvstore.samples import (
    MIB,
    OTHER,
    SHAPE,
    block_ids,
    layer_put,
    open_store,
    put_blocks,
    put_layer,
    read_blocks,
)
from tests.waiting import wait_until

SEED = 4711
SECONDS = 2.0
SEQUENCES = [(shape, block_ids(10, f"{number}")) for number in range(24) for shape in (SHAPE, OTHER)]


def client(
    store: BlockStore,
    seed: int,
    done: threading.Event,
    served: list[int],
    condemned: list[int],
    failures: list[BaseException],
) -> None:
    dice = random.Random(seed)
    try:
        while not done.is_set():
            shape, ids = dice.choice(SEQUENCES)
            action = dice.random()
            if action < 0.5:
                found = len(store.match(shape.model, ids))
                served.append(read_blocks(store, ids, shape))
                if found < len(ids):
                    put_blocks(store, ids[found:], writer=f"writer {seed}", shape=shape)
            elif action < 0.8:
                served.append(read_blocks(store, ids[: dice.randint(1, 10)], shape))
            elif action < 0.9:
                put_layer(store, layer_put(ids, 0, writer=f"dying {seed}", shape=shape))
            elif action < 0.95:
                store.begin_put(layer_put(ids, 1, writer=f"broken {seed}", shape=shape)).break_off()
            else:
                with store.open_run(shape.model, ids) as run:
                    _, generations, _ = run.layer(0, 5)
                if generations:
                    gone = store.condemn(shape.model, ids[len(generations) - 1], generations[-1])
                    condemned.append(int(gone))
    except BaseException as error:
        failures.append(error)
        raise


def test_many_at_once(tmp_path: Path) -> None:
    print(f"replay with SEED = {SEED}")
    store = open_store(tmp_path, dram_bytes=3 * MIB, disk_bytes=5 * MIB, staging_s=0.2, put_wait_s=0.02)
    served: list[int] = []
    condemned: list[int] = []
    failures: list[BaseException] = []
    done = threading.Event()
    clients = [
        threading.Thread(target=client, args=(store, SEED + number, done, served, condemned, failures))
        for number in range(8)
    ]
    for thread in clients:
        thread.start()

    def much_happened() -> bool:
        counters = store.stats().counters
        enough = sum(served) > 100 and sum(condemned) > 0
        return bool(failures) or (enough and counters.evictions_dram > 0 and counters.evictions_disk > 0)

    time.sleep(SECONDS)
    try:
        wait_until(much_happened, "evictions from both tiers, objects read and condemned")
    finally:
        done.set()
        for thread in clients:
            thread.join(scaled(60))
    assert failures == []
    wait_until(lambda: store.stats().pending_writes == 0 and store.stats().staging == 0)
    stats = store.stats()
    assert stats.counters.corrupt == sum(condemned)  # what came from disk was right
    assert stats.counters.read_errors == 0
    assert stats.dram_used_bytes <= 3 * MIB
    assert stats.disk_used_bytes <= 5 * MIB
    # Nothing is pinned any more: new blocks of either model may have all of the memory.
    for shape in (SHAPE, OTHER):
        capacity = 2 * MIB // shape.slot_bytes
        ids = block_ids(capacity, f"after all, {shape.layers}")
        for start in range(0, capacity, 8):
            wait_until(partial(fits, store, ids[start : start + 8], shape))
        assert read_blocks(store, ids[-8:], shape) == 8
    store.close()
    again = open_store(tmp_path, dram_bytes=3 * MIB, disk_bytes=5 * MIB)
    for shape, ids in SEQUENCES:
        read_blocks(again, ids, shape)
    assert again.stats().counters.corrupt == 0
    again.close()


def fits(store: BlockStore, ids: list[bytes], shape: BlockShape) -> bool:
    """Whether all of these blocks are in the store, after sending them once more."""
    put_blocks(store, ids, shape=shape)
    return len(store.match(shape.model, ids)) == len(ids)
