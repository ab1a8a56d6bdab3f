"""Objects whose heads come and go by parts: from the ranks of a writer, and to those of a reader."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from kvcommons.errors import DataLoss, InvalidInput
from kvcommons.rblock.checksum import checksum
from kvcommons.rblock.heads import HeadPart, divided
from services.kvstore.blocks import BlockStore
from tests.unit.kvstore.samples import (
    SHAPE,
    block_ids,
    content,
    layer_put,
    open_store,
    put_blocks,
    put_layer,
    read_blocks,
    wait_durable,
)

IDS = block_ids(6)
PARTS = 4


def read_heads(store: BlockStore, heads: HeadPart) -> int:
    with store.open_run(SHAPE.model, IDS) as run:
        read = len(run)
        for layer in range(SHAPE.layers):
            checksums, _, pieces = run.layer(layer, 10, heads)
            for number, (block_id, digest) in enumerate(zip(IDS, checksums, strict=False)):
                got = b"".join(pieces[2 * number : 2 * number + 2])
                assert got == content(block_id, layer, heads=heads)
                assert digest == checksum(block_id, layer, got)
            read = min(read, len(checksums))
        return read


@pytest.mark.parametrize("seed", range(4))
def test_a_block_is_whole_once_all_parts_of_all_layers_have_come(tmp_path: Path, seed: int) -> None:
    """In any order, each part's first layer first: then anybody reads it, from disk too."""
    store, draw = open_store(tmp_path), random.Random(seed)
    due = {number: [(0, 1), (1, 2)] for number in range(PARTS)}  # first layer, and how many
    while due:
        assert read_blocks(store, IDS) == 0
        number = draw.choice(list(due))
        layer, count = due[number].pop(0)
        heads = HeadPart(number=number, parts=PARTS)
        assert put_layer(store, layer_put(IDS, layer, count=count, heads=heads)) == []
        if not due[number]:
            del due[number]
    assert read_blocks(store, IDS) == len(IDS)
    assert wait_durable(store, IDS) == len(IDS)
    store.close()
    again = open_store(tmp_path)
    assert [read_heads(again, part) for part in divided(2)] == [len(IDS)] * 2
    assert read_blocks(again, IDS) == len(IDS)
    again.close()


def test_parts_that_come_at_once_make_one_block(tmp_path: Path) -> None:
    store = open_store(tmp_path)

    def write(part: HeadPart) -> None:
        for layer in range(SHAPE.layers):
            put_layer(store, layer_put(IDS, layer, heads=part))

    for _ in range(20):
        threads = [threading.Thread(target=write, args=(part,)) for part in divided(PARTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert read_blocks(store, IDS) == len(IDS)
        assert store.stats().staging == 0
        store.forget(SHAPE.model, IDS)
    store.close()


def test_a_rank_that_begins_anew_spoils_nothing(tmp_path: Path) -> None:
    """A prompt was given up between two layers, and is computed again under the same identities."""
    store = open_store(tmp_path)
    one, other = divided(2)
    put_layer(store, layer_put(IDS, 0, heads=one))
    put_layer(store, layer_put(IDS, 0, heads=other))
    put_layer(store, layer_put(IDS, 0, heads=one))
    put_layer(store, layer_put(IDS, 1, heads=other))  # of the time before, still under way
    put_layer(store, layer_put(IDS, 1, count=2, heads=one))
    assert read_blocks(store, IDS) == 0
    put_layer(store, layer_put(IDS, 0, heads=other))
    for layer in (1, 2):
        put_layer(store, layer_put(IDS, layer, heads=other))
    assert read_blocks(store, IDS) == len(IDS)
    store.close()


def test_a_process_that_saves_a_block_once_more_takes_nothing_from_the_others(tmp_path: Path) -> None:
    """Of two stages of two ranks, of which one has found the block, and sends its part again, before the last
    part has come; what the others found they may have sent before."""
    store = open_store(tmp_path)
    one, other = divided(2)
    put_layer(store, layer_put(IDS, 0, count=2, heads=one))
    put_layer(store, layer_put(IDS, 0, count=2, heads=other))
    for _ in range(2):
        put_layer(store, layer_put(IDS, 2, heads=one))
    put_layer(store, layer_put(IDS, 0, count=2, heads=one))
    assert read_blocks(store, IDS) == 0
    put_layer(store, layer_put(IDS, 2, heads=other))
    assert read_blocks(store, IDS) == len(IDS)
    store.close()


def test_parts_that_are_not_what_was_sent_are_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    one, other = divided(2)
    put_layer(store, layer_put(IDS, 0, count=SHAPE.layers, heads=one))
    wrong = layer_put(IDS, 0, count=SHAPE.layers, heads=other)
    wrong = replace(wrong, checksums=[*wrong.checksums[:-1], 7])
    with pytest.raises(DataLoss, match="heads 1/2 of layer 2"):
        put_layer(store, wrong)
    assert read_blocks(store, IDS) == 0
    put_layer(store, layer_put(IDS, 0, count=SHAPE.layers, heads=other))
    assert read_blocks(store, IDS) == len(IDS)
    store.close()


def test_writers_with_other_parts_do_not_meet(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put_layer(store, layer_put(IDS, 0, count=2, heads=divided(2)[0]))
    put_layer(store, layer_put(IDS, 2, heads=divided(4)[3]))  # refused: it is of another division
    put_layer(store, layer_put(IDS, 2, heads=divided(2)[0]))
    put_layer(store, layer_put(IDS, 0, count=3, heads=divided(2)[1]))
    assert read_blocks(store, IDS) == len(IDS)
    store.close()


def test_who_reads_some_heads_is_not_sent_a_corrupt_object(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put_blocks(store, IDS)
    with store.open_run(SHAPE.model, IDS) as run:
        _, _, objects = run.layer(1, 10)
        objects[3][-1] ^= 1
    assert read_heads(store, divided(2)[0]) == 3
    assert store.match(SHAPE.model, IDS) == [True] * 3
    with pytest.raises(InvalidInput, match="no 3 equal parts"):
        read_heads(store, divided(3)[0])
    store.close()
