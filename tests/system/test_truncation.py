"""A session that outgrows the context window goes on with the KV that is left: through a restart, a fork, the
death of a decode instance in mid-answer and the loss of all KV. Its tokens are those of a replay of all its
tokens and truncations."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvcommons.errors import KVCommonsError
from kvcommons.model.chat import ChatTemplate
from kvcommons.model.synthetic import write_random_folder
from kvcommons.model.tokenizer import Tokenizer
from tests.contract.truncation_reference import TruncatedReference
from tests.fault.conftest import BLOCK_TOKENS, SLOW_MODEL, slow_tables
from tests.fault.streams import NEVER_ENDS, Victims, until_whole
from tests.system.conftest import LOADS
from tests.system.stack import Stack
from tests.system.test_restart import until_on_disk

pytestmark = pytest.mark.timeout(300)  # two starts of a stack, and as many replays by the reference

WINDOW = 512
BANNED = (0, 1, 2)  # by NEVER_ENDS
SYSTEM = "You are a patient miller who tells boats and rivers apart and answers in short words only."
CHAT = "/v1/chat/completions"
WORDS = ["river", "boats", "past", "quiet", "fields", "children", "waved", "from", "a", "wooden", "bridge"]
_serial = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What an answer said of its turn."""

    start: int  # in the session's tokens
    end: int
    answer_tokens: int
    prompt_tokens: int
    cached_tokens: int
    dropped_tokens: int
    kv: str


@dataclass
class Conversation:
    """One session of a stack."""

    stack: Stack
    id: str
    reported: list[Told] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def say(self, count: int = 20, *, max_tokens: int = 24, seed: int | None = None, **more: Any) -> Told:
        """A message of so many words."""
        draw = random.Random(f"{self.id} {len(self.tokens)}" if seed is None else seed)
        message = {"role": "user", "content": " ".join(draw.choices(WORDS, k=count))}
        first = [] if self.reported else [{"role": "system", "content": SYSTEM}]
        body = {
            "messages": [*first, message], "session_id": self.id, "max_tokens": max_tokens, "temperature": 0,
            "truncation": "auto", **NEVER_ENDS, **more,
        }  # fmt: skip
        return self.heard(self.stack.client.post(CHAT, body))

    def heard(self, reply: Any) -> Told:
        start = len(self.tokens)
        self.tokens = self.stack.client.session(self.id)["token_ids"]
        truncation = reply.get("truncation", {"dropped_tokens": 0, "kv": "kept"})
        usage = reply["usage"]
        reported = Told(
            start=start,
            end=len(self.tokens),
            answer_tokens=usage["completion_tokens"],
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            **truncation,
        )
        self.reported.append(reported)
        assert reported.end - reported.dropped_tokens == reported.prompt_tokens + reported.answer_tokens
        return reported

    def check(self, reference: TruncatedReference, head: int) -> None:
        """Every token of every answer, as far as the reference is sure of it."""
        reference.begin()
        context: list[int] = []
        dropped = sure = 0
        for reported in self.reported:
            gone = reported.dropped_tokens - dropped
            dropped = reported.dropped_tokens
            complete = (len(context) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            kept = context[:head] + context[head + gone :] if gone else context
            if reported.kv == "recomputed":
                reference.begin()
            elif gone:
                reference.truncate(complete, head, gone)
            context = kept + self.tokens[reported.start : reported.end]
            assert len(context) == reported.prompt_tokens + reported.answer_tokens
            logits = reference.feed(context[reference.length :])[-reported.answer_tokens - 1 : -1].clone()
            logits[:, list(BANNED)] -= 100
            best = logits.topk(2)
            for row, token in enumerate(context[-reported.answer_tokens :]):
                if best.values[row, 0] - best.values[row, 1] > 1e-3:
                    assert token == best.indices[row, 0], f"token {row} of the answer at {reported.start}"
                    sure += 1
        assert sure > sum(reported.answer_tokens for reported in self.reported) * 0.8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("window")
    config = {**SLOW_MODEL, "max_position_embeddings": WINDOW}
    write_random_folder(folder, config, dtype="float32", init_range=0.08)
    return folder


@pytest.fixture(scope="module")
def head(model: Path) -> int:
    """Tokens that stay: the system prompt to the end of its last block."""
    template = ChatTemplate.read(model, Tokenizer.read(model))
    prompt = template.prompt([{"role": "system", "content": SYSTEM}, {"role": "user", "content": "hi"}])
    assert template.end_of_turn is not None
    end = prompt.index(template.end_of_turn) + 2  # a line break follows
    return -(-end // BLOCK_TOKENS) * BLOCK_TOKENS


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    running = Stack(folder, tables=slow_tables(prefill=LOADS), model=str(model), decode=2, attention_pool=0)
    with running:
        yield running
    running.assert_gone()


@pytest.mark.slow
def test_a_session_outlives_its_window(stack: Stack, model: Path, head: int) -> None:
    name = f"outlives-{next(_serial)}"
    session = Conversation(stack, name)
    while not session.say().dropped_tokens:
        assert len(session.reported) < 8
    first = session.reported[-1]
    assert first.kv == "kept"
    assert first.dropped_tokens == WINDOW // 2
    # All that was complete and is left was reused.
    history = first.start - first.dropped_tokens
    assert first.cached_tokens == (history - 1) // BLOCK_TOKENS * BLOCK_TOKENS

    until_on_disk(stack, name)
    stack.kill_all()
    stack.start()
    after = session.say()
    assert (after.kv, after.dropped_tokens) == ("kept", first.dropped_tokens)
    assert after.cached_tokens == (after.start - after.dropped_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS

    stack.client.post(f"/v1/sessions/{name}/fork", {"id": f"{name}-fork"})
    fork = Conversation(stack, f"{name}-fork", list(session.reported), list(session.tokens))
    assert session.say(5, seed=1).kv == fork.say(5, seed=1).kv == "kept"
    assert session.tokens == fork.tokens

    until_whole(stack, {"prefill": 1, "decode": 2, "kvstore": 1})
    victims = Victims(stack, "decode")
    body = {"max_tokens": 100, "truncation": "auto", "temperature": 0, **NEVER_ENDS}
    resumed = list(disturbed(stack, name, victims, body))[-1]
    assert resumed.timings["resumptions"] == 1
    session.heard(
        {
            "usage": {
                "completion_tokens": resumed.completion_tokens,
                "prompt_tokens": resumed.prompt_tokens,
                "prompt_tokens_details": {"cached_tokens": resumed.cached_tokens},
            },
            "truncation": {
                "dropped_tokens": stack.client.session(name)["dropped_tokens"],
                "kv": "kept",
            },
        }
    )
    while session.say().dropped_tokens < 2 * first.dropped_tokens:
        assert len(session.reported) < 14
    assert session.say().kv == "kept"
    reference = TruncatedReference(model)
    session.check(reference, head)
    fork.check(reference, head)


def disturbed(stack: Stack, session: str, victims: Victims, body: dict[str, Any]) -> Iterator[Any]:
    for number, part in enumerate(stack.client.chat("and then?", session, **body)):
        yield part
        if number == 10:
            assert victims.kill_busy(), "no decode instance is at work"


@pytest.mark.parametrize(
    ("replay_max", "intact_bytes"),
    [
        (4.0, 0),
        (0.0, 0),
        (0.0, 64 * 1024),
    ],
)
@pytest.mark.slow
def test_kv_that_is_lost_is_made_again(
    tmp_path: Path, model: Path, head: int, replay_max: float, intact_bytes: int
) -> None:
    """Where the loss shows only in the midst of the turn, it is replayed whatever that costs: the turn has
    begun. So nothing reads blocks before it: no scrubbing, and a policy that fetches none ahead."""
    kvstore = {"scrub_bytes_per_s": 0, "policy": "lru"}
    tables = slow_tables(router={"replay_max": replay_max}, kvstore=kvstore)
    stack = Stack(tmp_path / "stack", tables=tables, model=str(model))
    with stack:
        session = Conversation(stack, "s")
        while not session.say().dropped_tokens:
            assert len(session.reported) < 8
        until_on_disk(stack, "s")
    wipe(stack.data, intact_bytes)
    with stack:
        again = session.say(10)
        assert again.kv == ("replayed" if replay_max or intact_bytes else "recomputed")
        assert session.say(10).kv == "kept"
    session.check(TruncatedReference(model), head)
    stack.assert_gone()


def wipe(data: Path, intact_bytes: int) -> None:
    """KV on disk, but for the first bytes of each slab file: without those it is known at once that all is
    lost. Sessions stay."""
    slabs = [path for path in data.rglob("*slab*") if path.is_file()]
    assert slabs
    for path in slabs:
        size = path.stat().st_size
        os.truncate(path, intact_bytes)
        os.truncate(path, size)


@pytest.mark.slow
def test_what_cannot_be_truncated_is_refused(stack: Stack) -> None:
    name = f"refused-{next(_serial)}"
    session = Conversation(stack, name)
    session.say()
    long = " ".join(WORDS * 80)
    for body, param in (
        ({"messages": [{"role": "user", "content": long}], "session_id": name}, "messages"),
        (
            {"messages": [{"role": "user", "content": "hi"}], "session_id": name, "max_tokens": WINDOW},
            "max_tokens",
        ),
        ({"messages": [{"role": "user", "content": "hi"}]}, "truncation"),
    ):
        with pytest.raises(KVCommonsError) as refused:
            stack.client.post(CHAT, {**body, "truncation": "auto"})
        assert (refused.value.param, refused.value.http_status) == (param, 400)
    assert stack.client.session(name)["tokens"] == len(session.tokens)
    while not session.reported[-1].dropped_tokens:
        session.say()
    with pytest.raises(KVCommonsError, match="reuse"):
        session.say(reuse=False)
    session.say(truncation="disabled")  # nothing has to go
    with pytest.raises(KVCommonsError) as full:
        session.say(truncation="disabled", max_tokens=WINDOW // 2)
    assert full.value.code == "context_length_exceeded"
