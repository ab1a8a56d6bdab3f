"""Which sequences enter the line next: every stage may have a batch, and nobody waits for ever."""

from __future__ import annotations

import random
from collections import Counter, deque

from kvcommons.stages.batches import next_batch


def test_batches_are_even_and_of_the_oldest_that_are_free() -> None:
    assert next_batch([3, 4, 5, 7, 9], (), 2) == [3, 4, 5]
    assert next_batch([3, 4, 5, 7, 9], (3, 4, 5), 2) == [7, 9]
    assert next_batch([3, 4, 5, 7, 9], (3, 4, 5, 7, 9), 2) == []
    assert next_batch([3], (), 4) == [3]
    assert next_batch([], (), 4) == []


def test_every_sequence_generates_while_others_come_and_go() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        stages = draw.randrange(2, 6)
        pipeline, tokens = deque[list[int]](), Counter[int]()
        ready = list(range(draw.randrange(1, 12)))
        stays = ready[-1]  # the youngest at first
        for _ in range(400):
            if draw.random() < 0.05:
                ready.append(ready[-1] + 1)
            if draw.random() < 0.05 and ready[0] != stays:
                gone = ready[0]
                if all(gone not in batch for batch in pipeline):
                    ready.remove(gone)
            under_way = [key for batch in pipeline for key in batch]
            batch = next_batch(ready, under_way, stages)
            if batch and len(pipeline) < stages:
                assert not set(batch) & set(under_way)
                pipeline.append(batch)
            elif pipeline:
                tokens.update(pipeline.popleft())
        assert tokens[stays] >= 400 // (4 * stages)
