"""What other threads ask of an engine's thread, and are answered."""

from __future__ import annotations

from concurrent.futures import Future

from kvcommons.engine.mailbox import reply


def test_who_has_left_is_not_answered() -> None:
    """The engine's thread does not fail by it."""
    waits, left = Future[int](), Future[int]()
    assert left.cancel()
    for answer in (waits, left):
        reply(answer, 5)
    assert waits.result(0) == 5
    assert left.cancelled()
