"""The database of records dies in mid-stream: the stream goes on, its commit waits, and what the client is
told is in the database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from devstack.rest import Piece, Turn
from kvcommons.errors import StoreUnavailable, TurnInProgress
from tests.contract.postgres_server import PostgresServer, running
from tests.fault.conftest import slow_tables
from tests.fault.streams import ANSWER_TOKENS, NEVER_ENDS, SAMPLINGS, stream, token_ids
from tests.system.stack import Stack

TELLS = ("My cat is called Zuzu. Tell me a long story about her.", "And what did my brother Benno say?")
COMMIT_S = 4.0
PARAMETERS = {**NEVER_ENDS, **SAMPLINGS["sampled"]}


@pytest.fixture(scope="module")
def database() -> Iterator[PostgresServer]:
    with running(PostgresServer()) as server:
        yield server


@pytest.fixture(scope="module")
def stack(
    tmp_path_factory: pytest.TempPathFactory, slow_model: Path, database: PostgresServer
) -> Iterator[Stack]:
    tables = slow_tables(
        kvstore={"records": database.url(), "records_timeout_s": 1.0},
        router={"commit_deadline_s": COMMIT_S, "lease_ms": 5_000},
    )
    folder = tmp_path_factory.mktemp("away")
    with Stack(folder, tables=tables, model=str(slow_model), attention_pool=0) as it:
        yield it
    it.assert_gone()


@pytest.fixture(scope="module")
def calm(stack: Stack) -> tuple[list[Turn], list[int]]:
    """Two turns of an undisturbed session, and its tokens."""
    turns = [stream(stack, "calm", text, **SAMPLINGS["sampled"])[0] for text in TELLS]
    return turns, token_ids(stack, "calm")


def test_a_commit_waits_for_a_database_that_comes_back(
    stack: Stack, database: PostgresServer, calm: tuple[list[Turn], list[int]]
) -> None:
    (expected, after), expected_ids = calm
    text = ""
    turn = None
    for number, part in enumerate(
        stack.client.chat(TELLS[0], "waited-for", max_tokens=ANSWER_TOKENS, **PARAMETERS)
    ):
        if isinstance(part, Turn):
            turn = part
            continue
        text += part.text
        if number == 10:
            database.kill()
        if text == expected.text:
            database.start()  # it takes a while, and the commit waits for it
    assert turn is not None
    assert (turn.text, turn.finish_reason) == (expected.text, expected.finish_reason)
    assert turn.timings["resumptions"] == 0
    again, _ = stream(stack, "waited-for", TELLS[1], **SAMPLINGS["sampled"])
    assert again.text == after.text
    assert token_ids(stack, "waited-for") == expected_ids


@pytest.mark.slow
def test_nothing_is_acknowledged_that_is_not_there(
    stack: Stack, database: PostgresServer, calm: tuple[list[Turn], list[int]]
) -> None:
    """The database stays away for longer than a commit waits: the client has all of the answer, and is told
    that it was not kept; its next try finds the session as it was."""
    (_, expected), expected_ids = calm
    stream(stack, "kept", TELLS[0], **SAMPLINGS["sampled"])
    before = token_ids(stack, "kept")
    pieces = [""]

    def listen() -> None:
        for number, part in enumerate(
            stack.client.chat(TELLS[1], "kept", max_tokens=ANSWER_TOKENS, **PARAMETERS)
        ):
            assert isinstance(part, Piece), "the turn was acknowledged"
            pieces.append(part.text)
            if number == 10:
                database.kill()

    try:
        with pytest.raises(StoreUnavailable, match="the session store was out of reach") as reported:
            listen()
        assert "the database of records did not answer" in reported.value.message
        assert "".join(pieces) == expected.text
        with pytest.raises(StoreUnavailable):
            stack.client.session("kept")
        stack.until(lambda: not stack.client.healthy(), 60.0, "the stack says that all is well")
    finally:
        database.start()
        database.wait_ready()
    stack.until(stack.client.healthy, 60.0, "the stack is not healthy again")
    assert token_ids(stack, "kept") == before
    turns: list[Turn] = []

    def free() -> bool:
        """The lease of the turn that was lost runs out by itself."""
        try:
            turns.append(stream(stack, "kept", TELLS[1], **SAMPLINGS["sampled"])[0])
        except TurnInProgress:
            return False
        return True

    stack.until(free, 60.0, "the session stays locked")
    assert turns[-1].text == expected.text
    assert token_ids(stack, "kept") == expected_ids
    stack.assert_no_block_is_held()
