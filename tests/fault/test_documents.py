"""kill -9 in the middle of a long document: whoever comes next goes on with it, and what one chats on then
is, token for token, what the document would have been in one request."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from devstack.rest import RestClient
from kvcommons.errors import KVCommonsError, NotFound, TurnInProgress, Unavailable
from tests.contract.rest_stack import free_port
from tests.exactness import assert_greedy, logits_of
from tests.fault.conftest import BLOCK_TOKENS, slow_tables
from tests.machine import scaled
from tests.pausing import pause
from tests.system.scrape import scrape
from tests.system.stack import Stack
from tests.waiting import wait_until

SENTENCES = 130
REFERRED = 50  # of a document that the reference reads, too, in a time that grows with their square
FIRST_TOKENS = 1024  # of a part of which nobody knows how long it takes
# A part takes as long as a test needs to hit it; a router that is gone is missed soon.
ROUTER: dict[str, object] = {"document_part_s": 0.15, "lease_ms": 1500, "resume_deadline_s": 3.0}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, slow_model: Path) -> Iterator[Stack]:
    tables = slow_tables(router=ROUTER)
    folder = tmp_path_factory.mktemp("documents")
    shared = Stack(folder, tables=tables, model=str(slow_model), attention_pool=0)
    with shared:
        yield shared
    shared.assert_gone()


@pytest.fixture(scope="module")
def reference(slow_model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(slow_model, dtype=torch.float32, attn_implementation="eager")


def document_of(session: str, sentences: int = SENTENCES) -> str:
    """One that no other session has: nothing of it is stored."""
    return f"{session}: " + " ".join(f"My friend number {i} likes the colour blue." for i in range(sentences))


def path_of(session: str) -> str:
    return f"/v1/sessions/{session}/prefill"


def states(stack: Stack, session: str) -> Iterator[dict[str, Any]]:
    """To the end, over any number of connections."""
    while True:
        try:
            with closing(stack.client.events(f"{path_of(session)}?stream=true")) as events:
                for state in events:
                    yield state
                    if state["status"] != "running":
                        return
        except Unavailable:
            threading.Event().wait(scaled(0.1))


def until_computed(stack: Stack, session: str, percent: float) -> dict[str, Any]:
    for state in states(stack, session):
        assert state["status"] == "running", "it was over before anything could happen to it"
        if state["percent"] >= percent:
            return state
    raise AssertionError("unreachable: the states have an end")


def tokens_by_prefill(stack: Stack) -> float:
    """That it has computed. Those whose KV it found do not count."""
    return scrape(stack, "prefill").value("kvcommons_prefill_tokens_total", source="computed")


def assert_one_chats_on_it(stack: Stack, reference: Any, session: str) -> None:
    turn = stack.client.say("Who likes blue?", session, max_tokens=16, temperature=0.0, ignore_eos=True)
    assert turn.cached_tokens > turn.prompt_tokens * 0.9, "its KV was computed, and kept"
    tokens = stack.client.session(session)["token_ids"]
    prompt, made = tokens[: turn.prompt_tokens], tokens[turn.prompt_tokens :]
    assert_greedy(made[:16], logits_of(reference, prompt, made[:16]))
    whole = [
        {"role": "system", "content": document_of(session, REFERRED)},
        {"role": "user", "content": "Who likes blue?"},
    ]
    body = {"messages": whole, "max_tokens": 16, "temperature": 0.0, "ignore_eos": True, "reuse": False}
    alone = stack.client.post("/v1/chat/completions", body)
    assert alone["usage"]["prompt_tokens"] == turn.prompt_tokens
    assert alone["choices"][0]["message"]["content"] == turn.text


@pytest.mark.parametrize(
    "victim",
    ["router", *(pytest.param(one, marks=pytest.mark.slow) for one in ("prefill", "decode", "kvstore"))],
)
def test_a_death_in_the_middle_of_a_document(stack: Stack, reference: Any, victim: str) -> None:
    session = f"document-{victim}"
    stack.client.post(path_of(session), {"content": document_of(session, REFERRED)})
    before = until_computed(stack, session, 25)
    stack.kill(victim)
    counted = 0 if victim == "prefill" else tokens_by_prefill(stack)
    found = list(states(stack, session))
    assert found[-1]["status"] == "completed", found[-1]
    assert found[-1]["id"] == before["id"]
    assert found[-1]["computed_tokens"] == found[-1]["tokens"]
    if victim != "prefill":  # with which dies what it had not saved
        left = before["tokens"] - before["computed_tokens"]
        assert tokens_by_prefill(stack) - counted <= left + BLOCK_TOKENS, "it began anew"
    assert_one_chats_on_it(stack, reference, session)
    stack.assert_no_block_is_held()


@contextlib.contextmanager
def another_router(stack: Stack, output: Path) -> Iterator[tuple[RestClient, subprocess.Popen[bytes]]]:
    """Of the same settings and over the same store, which nobody starts again."""
    port = free_port()
    client = RestClient(f"http://127.0.0.1:{port}")
    command = [sys.executable, "-m", "services.router", "--config", str(stack.runtime / "kvcommons.toml")]
    command += ["--set", f"listen=unix:{stack.runtime / 'another'}.c", "--set", f"port={port}"]
    with output.open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as running:
        try:
            wait_until(client.healthy, "the other router is not ready")
            yield client, running
        finally:
            running.kill()


def test_another_router_goes_on_from_the_last_saved_block(stack: Stack, tmp_path: Path) -> None:
    """The one that began it is killed; until then the other one knows of it by the record."""
    session = "document-of-another"
    path = path_of(session)
    with another_router(stack, tmp_path / "another.log") as (client, router):
        client.post(path, {"content": document_of(session)})
        wait_until(lambda: client.get(path)["percent"] >= 40, "it gets no further")
        prefill = stack.pid("prefill")
        pause(prefill)  # the record is as far as the document then, as soon as the lease is renewed
        try:
            wait_until(
                lambda: stack.client.get(path)["computed_tokens"] == client.get(path)["computed_tokens"],
                "the record does not say how far it is",
            )
            before = stack.client.get(path)
            router.kill()
            router.wait(scaled(10))
        finally:
            os.kill(prefill, signal.SIGCONT)
    counted = tokens_by_prefill(stack)
    assert before["status"] == "running"
    assert before["computed_tokens"] > FIRST_TOKENS, "which a part has that begins anew"
    found = list(states(stack, session))
    assert (found[-1]["status"], found[-1]["id"]) == ("completed", before["id"])
    computed = [state["computed_tokens"] for state in found]
    assert computed[0] >= before["computed_tokens"]
    assert computed == sorted(computed)
    assert computed[-1] == before["tokens"]
    left = before["tokens"] - before["computed_tokens"]
    assert tokens_by_prefill(stack) - counted <= left + BLOCK_TOKENS
    turn = stack.client.say("Who likes blue?", session, max_tokens=4)
    assert turn.cached_tokens >= before["tokens"] - BLOCK_TOKENS
    assert stack.client.session(session)["messages"][0]["content"] == document_of(session)
    stack.assert_no_block_is_held()


@pytest.mark.slow
def test_a_document_over_the_death_of_all(stack: Stack, reference: Any) -> None:
    stack.client.post(path_of("document-all"), {"content": document_of("document-all", REFERRED)})
    before = until_computed(stack, "document-all", 40)
    saved = stack.client.get("/v1/status")["store"]["disk_blocks"]
    assert saved > 0
    for victim in ("router", "decode", "prefill", "kvstore"):
        stack.kill(victim)
    after = next(state for state in states(stack, "document-all") if state["computed_tokens"])
    assert after["id"] == before["id"]
    *_, last = states(stack, "document-all")
    assert last["status"] == "completed", last
    assert_one_chats_on_it(stack, reference, "document-all")


def test_nobody_chats_meanwhile_and_one_can_end_it(stack: Stack) -> None:
    session = "document-ended"
    stack.client.say("Hello.", session, max_tokens=4)
    before = stack.client.session(session)["token_ids"]
    stack.client.post(path_of(session), {"content": document_of(session)})
    until_computed(stack, session, 10)
    with pytest.raises(TurnInProgress, match="% of its"):
        stack.client.say("Hello?", session, max_tokens=4)
    stack.kill("router")

    def is_told() -> bool:
        try:
            stack.client.say("Hello?", session, max_tokens=4)
        except TurnInProgress as error:
            return "% of its" in error.message
        except KVCommonsError:
            return False
        raise AssertionError("the session was free though its document had not ended")

    stack.until(is_told, 30.0, "nobody says that a document is on its way")
    assert stack.client.delete(path_of(session))["status"] == "cancelled"
    stack.client.say("Hello?", session, max_tokens=4)
    assert stack.client.session(session)["token_ids"][: len(before)] == before
    stack.assert_no_block_is_held()


def test_the_command_shows_it_over_a_death_of_the_router(stack: Stack, tmp_path: Path) -> None:
    file = tmp_path / "document.txt"
    file.write_text(document_of("command"))
    command = [sys.executable, "-m", "devstack", "prefill", "--url", stack.url, "--session", "command"]
    with subprocess.Popen([*command, str(file)], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        try:
            first = next(line for line in running.stdout if "0%" not in line.split(" of ")[0][:2])
            assert "tokens/s" in first
            stack.kill("router")
            rest, _ = running.communicate(timeout=scaled(60))
        finally:
            running.kill()
    assert running.returncode == 0
    assert "are in the session command" in rest


# As in a terminal: what a shell starts in the background ignores Ctrl-C.
HEARING = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from devstack.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_the_command_leaves_a_document_and_ends_it(stack: Stack, tmp_path: Path) -> None:
    file = tmp_path / "document.txt"
    file.write_text(document_of("left"))
    command = [sys.executable, "-c", HEARING, "prefill", "--url", stack.url, "--session", "left"]
    with subprocess.Popen([*command, str(file)], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        try:
            running.stdout.readline()
            running.send_signal(signal.SIGINT)
            rest, _ = running.communicate(timeout=scaled(60))
        finally:
            running.kill()
    assert running.returncode == 130
    assert "The document goes on" in rest
    assert stack.client.get(path_of("left"))["status"] == "running"
    ended = subprocess.run(
        [*command, "--cancel"], capture_output=True, text=True, timeout=scaled(30), check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "the session is as it was before" in ended.stdout
    assert stack.client.get(path_of("left"))["status"] == "cancelled"
    with pytest.raises(NotFound):
        stack.client.get(path_of("another"))
    nothing = subprocess.run(
        [*command[:-1], "another"], capture_output=True, text=True, timeout=scaled(30), check=False
    )
    assert nothing.returncode == 1
    assert "no document is on its way" in nothing.stderr
