"""How a document's parts are sized, and what is foretold of it."""

from __future__ import annotations

import pytest

from services.router.documents.progress import DocumentProgress, percent_of

BLOCK = 16


def seconds_of(first: int, end: int) -> float:
    """A machine: 1 ms a token, and 1 µs for each token before it."""
    return sum(1e-3 + 1e-6 * at for at in range(first, end))


def run(progress: DocumentProgress) -> list[tuple[int, float]]:
    """Ends and seconds of all parts."""
    parts = []
    while not progress.done:
        first, end = progress.computed, progress.next_end()
        seconds = seconds_of(first, end)
        progress.part_done(end, seconds, cached=first)
        parts.append((end, seconds))
    return parts


def test_parts_end_at_blocks_and_take_as_long_as_they_may() -> None:
    progress = DocumentProgress(before=10, tokens=50_005, block_tokens=BLOCK, part_s=5.0)
    parts = run(progress)
    assert [end for end, _ in parts] == sorted({end for end, _ in parts})
    assert all(end % BLOCK == 0 for end, _ in parts[:-1])
    assert parts[-1][0] == 50_005
    assert progress.computed_tokens == progress.document_tokens == 49_995
    assert all(seconds <= 5.5 for _, seconds in parts[2:]), "from the third on it knows that they slow down"
    assert all(seconds > 4 for _, seconds in parts[2:-1])


def test_the_end_is_foretold_though_tokens_become_slower() -> None:
    progress = DocumentProgress(before=0, tokens=100_000, block_tokens=BLOCK, part_s=5.0)
    assert progress.left_s == progress.tokens_per_s == 0
    while progress.computed < 30_000:
        first, end = progress.computed, progress.next_end()
        progress.part_done(end, seconds_of(first, end), cached=first)
    assert progress.left_s == pytest.approx(seconds_of(progress.computed, 100_000), rel=0.05)
    assert progress.tokens_per_s == pytest.approx(1 / (1e-3 + 1e-6 * progress.computed), rel=0.05)


def test_what_is_stored_is_not_computed_again_nor_counted_as_speed() -> None:
    progress = DocumentProgress(before=100, tokens=10_000, block_tokens=BLOCK, part_s=5.0)
    progress.found(5_008)
    assert progress.computed == 5_008
    progress.found(32)
    assert progress.computed == 5_008, "it goes on, not back"
    end = progress.next_end()
    progress.part_done(end, 1e-4, cached=end)
    assert progress.tokens_per_s == 0


def test_a_history_whose_kv_is_gone_counts_as_computed() -> None:
    progress = DocumentProgress(before=4_000, tokens=8_000, block_tokens=BLOCK, part_s=5.0)
    end = progress.next_end()
    progress.part_done(end, seconds_of(0, end), cached=0)
    assert progress.tokens_per_s > end / seconds_of(0, end) / 8


def test_a_part_that_fails_is_followed_by_a_smaller_one() -> None:
    progress = DocumentProgress(before=0, tokens=10_000, block_tokens=BLOCK, part_s=5.0)
    size = progress.next_end()
    progress.part_failed()
    assert progress.next_end() == size // 2
    for _ in range(20):
        progress.part_failed()
    assert progress.next_end() == BLOCK
    run(progress)
    assert progress.done


def test_a_hundred_percent_is_all() -> None:
    assert percent_of(99_999, 100_000) == 99.9
    assert percent_of(0, 100_000) == 0
    assert percent_of(100_000, 100_000) == 100
