"""Two kvstores in a whole stack: one dies or hangs in mid-conversation, and nobody who talks can tell."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from kvcommons.shards import ShardView, session_key
from tests.system.conftest import FLOAT32
from tests.system.stack import Stack

TELLS = ("My cat is called Zuzu.", "My brother is called Benno.", "What is my cat called?")
PROCESSES = {"kvstore": "kvstore-1", "kvstore-2": "kvstore-2"}  # by the folder
SETTLE_S = 60.0


def settled(stack: Stack, count: int) -> ShardView:
    """Waits until so many serve, and have all that they need."""
    found: list[ShardView] = []

    def look() -> bool:
        shards = stack.client.get("/v1/status")["shards"]
        if shards is None or len(shards["serving"]) != count or not shards["settled"] or shards["joining"]:
            return False
        found.append(ShardView(epoch=shards["epoch"], serving=tuple(shards["serving"])))
        return True

    stack.until(look, SETTLE_S, f"{count} kvstores never serve")
    return found[-1]


def home(stack: Stack, session: str) -> str:
    """The process that answers for a session."""
    shard = settled(stack, 2).home(session_key("local", session))
    return PROCESSES[shard.rpartition(".")[0]]


def test_conversations_go_on_whichever_kvstore_dies_or_hangs(tmp_path: Path) -> None:
    stack = Stack(tmp_path, tables=FLOAT32, kvstore=2, attention_pool=0)
    with stack:
        settled(stack, 2)
        calm = [stack.client.say(text, "calm", reuse=False, temperature=0).text for text in TELLS]
        assert "Zuzu" in calm[-1]
        sessions = [f"talk-{number}" for number in range(6)]
        for session in sessions:
            assert stack.client.say(TELLS[0], session, temperature=0).text == calm[0]

        stack.kill(home(stack, sessions[0]))
        for session in sessions:
            assert stack.client.say(TELLS[1], session, temperature=0).text == calm[1]
        settled(stack, 2)  # it was started again, and has caught up

        hung = stack.pid(home(stack, sessions[0]))
        os.kill(hung, signal.SIGSTOP)
        try:
            turns = [stack.client.say(TELLS[2], session, temperature=0) for session in sessions]
            settled(stack, 1)
        finally:
            os.kill(hung, signal.SIGCONT)
        assert [turn.text for turn in turns] == [calm[2]] * len(sessions)
        settled(stack, 2)
        tokens = {tuple(stack.client.session(session)["token_ids"]) for session in sessions}
        assert len(tokens) == 1
    stack.assert_gone()
