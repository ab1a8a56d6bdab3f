"""kill -9 of the router between a turn and its retry: the session's record has the answer."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.machine import scaled
from tests.system.conftest import FLOAT32
from tests.system.stack import Stack

CONFLICT = 409
LEASE_MS = 3000  # of a turn, once its router is gone


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    tables = {**FLOAT32, "router": {"lease_ms": LEASE_MS}}
    with Stack(tmp_path_factory.mktemp("retries"), tables=tables, attention_pool=0) as shared:
        yield shared
    shared.assert_gone()


def post(stack: Stack, body: dict[str, Any], key: str) -> tuple[int, bytes, bool]:
    """Status, answer, and whether it says that it was told before."""
    request = urllib.request.Request(
        f"{stack.v1}/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Idempotency-Key": key},
    )
    try:
        with urllib.request.urlopen(request, timeout=scaled(60)) as response:
            replayed = response.headers.get("Idempotent-Replayed") == "true"
            return response.status, response.read(), replayed
    except urllib.error.HTTPError as error:
        return error.code, error.read(), False


def killed(stack: Stack) -> None:
    stack.kill("router")
    stack.until(stack.client.healthy, 30, "the router does not come back")


def ask(text: str, session: str, **fields: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": text}],
        "session_id": session,
        "temperature": 0,
        **fields,
    }


@pytest.mark.parametrize("stream", [False, True])
def test_the_retry_of_a_committed_turn_is_answered_from_its_record(stack: Stack, stream: bool) -> None:
    """Later turns between them or none, the session is what it was, and the sampled answer the same."""
    session = f"kept-{stream}"
    # So warm an answer may wander to the end of the window, and then no turn could follow it.
    body = ask("My hen is called Zora.", session, stream=stream, temperature=1.5, max_tokens=64)
    status, first, replayed = post(stack, body, f"{session}-1")
    assert (status, replayed) == (200, False)
    killed(stack)
    status, again, replayed = post(stack, body, f"{session}-1")
    assert (status, replayed) == (200, True)
    assert text_of(again, stream) == text_of(first, stream)
    assert post(stack, ask("What is my hen called?", session), f"{session}-2")[0] == 200
    before = stack.client.session(session)
    killed(stack)
    status, again, replayed = post(stack, body, f"{session}-1")
    assert (status, replayed) == (200, True)
    assert text_of(again, stream) == text_of(first, stream)
    after = stack.client.session(session)
    assert (after["version"], after["token_ids"]) == (2, before["token_ids"])


def text_of(answer: bytes, stream: bool) -> str:
    if not stream:
        return str(json.loads(answer)["choices"][0]["message"]["content"])
    lines = [line[6:] for line in answer.decode().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def test_a_turn_that_died_with_its_router_is_computed_by_the_retry(stack: Stack) -> None:
    """It was not committed: the session waits for the dead router's lease, and is then what one turn makes of
    it."""
    session = "died"
    body = ask("Tell me of my hen.", session, stream=True, ignore_eos=True, max_tokens=400)
    request = urllib.request.Request(
        f"{stack.v1}/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Idempotency-Key": "died-1"},
    )
    with urllib.request.urlopen(request, timeout=scaled(60)) as stream:
        stream.readline()
        stack.kill("router")
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            stream.read()
    stack.until(stack.client.healthy, 30, "the router does not come back")

    def answered() -> bool:
        status, _, replayed = post(stack, body, "died-1")
        assert status in (200, CONFLICT)
        assert not replayed
        return status == 200

    stack.until(answered, 60, "the lease of a router that is gone does not end")
    assert stack.client.session(session)["version"] == 1
    assert post(stack, body, "died-1")[2]
