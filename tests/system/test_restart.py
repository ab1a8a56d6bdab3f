"""A conversation survives the death of every process: its KV is read from disk, and its tokens do not
change.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.system.conftest import FLOAT32, LOADS
from tests.system.stack import Stack

BLOCK_TOKENS = 16
TEMPERATURES = (0.0, 0.9)
_animals = itertools.cycle(("cat", "dog", "horse", "rabbit"))  # others at a second try


def turns(animal: str) -> tuple[str, str, str]:
    return f"My {animal} is called Zuzu.", "My brother is called Benno.", f"What is my {animal} called?"


def reusable_tokens(tokens: int) -> int:
    """Of n tokens the last has no KV yet."""
    return (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Not the shared one: it is killed and stopped here, and started again."""
    tables = {**FLOAT32, "prefill": {**FLOAT32["prefill"], **LOADS}}
    own = Stack(tmp_path_factory.mktemp("mortal"), tables=tables, attention_pool=0)
    with own:
        yield own
    own.assert_gone()


def test_a_turn_after_kill_9_of_everything_is_the_turn_without_it(mortal: Stack) -> None:
    """Without it: in a conversation that reuses nothing."""
    animals = {temperature: next(_animals) for temperature in TEMPERATURES}  # no prefix in common
    before, history = {}, {}
    for temperature, animal in animals.items():
        parameters = sampling(temperature)
        before[temperature] = [mortal.client.say(m, animal, **parameters) for m in turns(animal)[:2]]
        history[temperature] = mortal.client.session(animal)["tokens"]
        until_on_disk(mortal, animal)
    mortal.kill_all()
    mortal.start()
    for temperature, animal in animals.items():
        parameters = sampling(temperature)
        after = mortal.client.say(turns(animal)[2], animal, **parameters)
        alone = f"{animal}-undisturbed"
        expected = [mortal.client.say(m, alone, reuse=False, **parameters) for m in turns(animal)]
        assert [turn.cached_tokens for turn in expected] == [0, 0, 0]
        assert [turn.text for turn in (*before[temperature], after)] == [turn.text for turn in expected]
        assert after.prompt_tokens == expected[2].prompt_tokens
        assert after.cached_tokens == reusable_tokens(history[temperature]) > 0
        assert "Zuzu" in after.text or temperature > 0


def sampling(temperature: float) -> dict[str, float]:
    return {"temperature": temperature, "seed": 7, "max_tokens": 40}


def until_on_disk(stack: Stack, session_id: str) -> None:
    """A quiet machine saves a turn within two seconds, one that runs other tests may take longer."""

    def saved() -> bool:
        session = stack.client.session(session_id)
        tiers = session["tiers"]
        pending = stack.client.get("/v1/status")["store"]["pending_writes"]
        return tiers["absent"] == 0 and pending == 0 and session["blocks"] > 0

    stack.until(saved, 10.0, "the turn's KV is not on disk")


def test_an_orderly_restart_keeps_sessions_and_forks(mortal: Stack) -> None:
    mortal.client.say(turns("bird")[0], "orderly", temperature=0)
    fork = mortal.client.post("/v1/sessions/orderly/fork", {"id": "forked"})
    assert fork["parent"] == "orderly"
    before = {session["id"] for session in mortal.client.get("/v1/sessions")["data"]}
    mortal.stop()
    mortal.assert_gone()
    mortal.start()
    assert {session["id"] for session in mortal.client.get("/v1/sessions")["data"]} == before
    assert before >= {"orderly", "forked"}
    for session_id in ("orderly", "forked"):
        turn = mortal.client.say(turns("bird")[2], session_id, temperature=0)
        assert "Zuzu" in turn.text
        assert turn.cached_tokens > 0
