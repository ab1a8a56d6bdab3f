"""kill -9 of each service in mid-stream: the client gets the very tokens of an undisturbed run."""

from __future__ import annotations

import itertools
import json
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from devstack.rest import Turn
from kvcommons.errors import KVCommonsError
from tests.fault.conftest import TWINS, slow_tables
from tests.fault.streams import ANSWER_TOKENS, NEVER_ENDS, SAMPLINGS, Victims, stream, token_ids, until_whole
from tests.machine import scaled
from tests.pausing import pause
from tests.system.conftest import FLOAT32
from tests.system.real_model import fetched_smollm2
from tests.system.stack import Stack
from tests.system.test_grammar import answered

MESSAGE = "My cat is called Zuzu and my brother is called Benno. Tell me a long story about them."
# A silence has a bound. A quiet machine never reaches 5 s; one that is busy with other tests may.
DELAY_S_MAX = scaled(20.0)
TRIES = 5  # to meet an instance at work
FLAGS = 24  # of a call: it is long enough to be hit on the way
_serial = itertools.count()


@pytest.fixture(scope="module", params=["sampled", pytest.param("greedy", marks=pytest.mark.slow)])
def undisturbed(request: pytest.FixtureRequest, twins: Stack) -> tuple[dict[str, float], Turn, list[int]]:
    """Parameters, and what a run without reuse and without a death gives with them."""
    parameters = SAMPLINGS[request.param]
    session = f"undisturbed-{request.param}"
    turn, _ = stream(twins, session, MESSAGE, reuse=False, **parameters)
    return parameters, turn, token_ids(twins, session)


@pytest.fixture(autouse=True)
def whole(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test begins and ends with all instances there and no block held."""
    yield
    if "twins" in request.fixturenames:
        stack = request.getfixturevalue("twins")
        until_whole(stack, {**TWINS, "kvstore": 1})
        stack.assert_no_block_is_held()


@pytest.mark.parametrize("victim", ["prefill", "decode", "attention_pool", "ledger", "etcd", "kvstore"])
def test_a_death_in_mid_stream_changes_no_token(
    twins: Stack, undisturbed: tuple[dict[str, float], Turn, list[int]], victim: str
) -> None:
    parameters, expected, expected_ids = undisturbed
    victims = Victims(twins, victim)
    kill = victims.kill_busy if victim == "decode" else victims.kill_any
    for _ in range(TRIES):
        session = f"{victim}-{next(_serial)}"
        turn, silence_s = stream(twins, session, MESSAGE, kill, **parameters)
        if victims.killed:
            break
    assert victims.killed, "none was at work"
    assert turn.text == expected.text
    assert turn.finish_reason == expected.finish_reason
    assert turn.completion_tokens == expected.completion_tokens
    assert token_ids(twins, session) == expected_ids
    assert silence_s < DELAY_S_MAX
    assert turn.timings["resumptions"] == (1 if victim == "decode" else 0)


def test_an_answer_goes_on_within_its_grammar(twins: Stack) -> None:
    """The instance that goes on has nothing of the grammar's state but the tokens that were heard."""
    asked = {"structured_outputs": {"regex": "([a-f]{3}-[0-9]{2} ){30,40}!"}, **SAMPLINGS["sampled"]}

    def answer(session: str, kill: Callable[[], object] | None = None) -> Turn:
        for number, part in enumerate(twins.client.chat(MESSAGE, session, max_tokens=400, **asked)):
            if number == 10 and kill is not None:
                kill()
            if isinstance(part, Turn):
                return part
        raise AssertionError("a chat ends with its Turn")

    expected = answer(f"grammar-{next(_serial)}")
    assert expected.finish_reason == "stop"
    assert re.fullmatch("([a-f]{3}-[0-9]{2} ){30,40}!", expected.text)
    victims = Victims(twins, "decode")
    for _ in range(TRIES):
        turn = answer(f"grammar-{next(_serial)}", victims.kill_busy)
        if victims.killed:
            break
    assert victims.killed, "none was at work"
    assert turn.text == expected.text
    assert turn.timings["resumptions"] == 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("model", "schemas", "kills"), [("", 1000, 10), ("smollm2", 50, 5)])
def test_answers_keep_to_random_schemas_while_decode_is_killed(
    tmp_path: Path, model: str, schemas: int, kills: int
) -> None:
    """Each time that both instances are there, one at work is killed; at the end what the routers resumed is
    counted."""
    if model:
        fetched_smollm2()
    with Stack(tmp_path, decode=2, prefill=2, **({"model": model} if model else {})) as stack:
        until_whole(stack, {"prefill": 2, "decode": 2})
        killed, over, seeds = 0, threading.Event(), itertools.count()

        def kill() -> None:
            nonlocal killed
            while killed < kills and not over.wait(scaled(1.0)):
                try:
                    victims = Victims(stack, "decode")
                except grpc.RpcError:  # the last one is not back
                    continue
                if len(victims) < 2:  # the last ones are not even started again
                    continue
                while not over.is_set() and not victims.kill_busy():
                    time.sleep(0.01)
                killed += len(victims.killed)

        def ask() -> list[str]:
            """The reasons for which answers ended, until there were schemas and kills enough."""
            reasons: list[str] = []
            while (seed := next(seeds)) < schemas or not killer.done():
                reasons += answered(sdk, seed, model=name)
            return reasons

        with (
            openai.OpenAI(base_url=stack.v1, api_key="none", max_retries=0, timeout=scaled(300)) as sdk,
            ThreadPoolExecutor(7) as pool,
        ):
            name = sdk.models.list().data[0].id
            killer = pool.submit(kill)
            asked = [pool.submit(ask) for _ in range(6)]
            try:
                reasons = [reason for one in asked for reason in one.result(scaled(1800))]
            finally:
                over.set()
            killer.result()
        counts = re.findall(
            r"^kvcommons_turn_resumptions_total(?:{.*})? (\S+)", stack.client.text("/metrics"), re.M
        )
        resumed = sum(map(float, counts))
        print(f"{killed} kills, {len(reasons)} answers, resumed {resumed}")
        assert killed >= kills
        assert len(reasons) >= 2 * schemas
        assert reasons.count("stop") > len(reasons) // 2
        assert resumed > 0
        until_whole(stack, {"prefill": 2, "decode": 2})
        stack.assert_no_block_is_held()
    stack.assert_gone()


def test_a_call_goes_on_within_its_schema(twins: Stack) -> None:
    """Streamed, with its arguments' pieces, each once."""
    schema = {
        "type": "object",
        "properties": {
            "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": FLAGS, "maxItems": FLAGS}
        },
        "required": ["flags"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "set_flags", "parameters": schema}}
    asked = {
        "tools": [tool],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 15 * FLAGS,
    }

    def call(session: str, kill: Callable[[], object] | None = None) -> tuple[str, int]:
        """The arguments, and how many ids and names were sent."""
        arguments, begun = "", 0
        with openai.OpenAI(base_url=twins.v1, api_key="none", max_retries=0, timeout=scaled(120)) as sdk:
            chunks: Any = sdk.chat.completions.create(
                model=sdk.models.list().data[0].id,
                messages=[{"role": "user", "content": MESSAGE}],
                stream=True,
                extra_body={"session_id": session, **asked, **SAMPLINGS["sampled"]},
            )
            for number, chunk in enumerate(chunks):
                if number == 10 and kill is not None:
                    kill()
                for choice in chunk.choices:
                    for part in choice.delta.tool_calls or ():
                        arguments += part.function.arguments
                        begun += part.id is not None
        return arguments, begun

    plain = f"call-{next(_serial)}"
    expected, begun = call(plain)
    assert len(json.loads(expected)["flags"]) == FLAGS
    assert begun == 1
    victims = Victims(twins, "decode")
    for _ in range(TRIES):
        session = f"call-{next(_serial)}"
        resumed = call(session, victims.kill_busy)
        if victims.killed:
            break
    assert victims.killed, "none was at work"
    assert resumed == (expected, 1)
    assert token_ids(twins, session) == token_ids(twins, plain)


@pytest.mark.slow
def test_all_instances_of_a_kind_may_die_one_after_the_other(
    twins: Stack, undisturbed: tuple[dict[str, float], Turn, list[int]]
) -> None:
    parameters, expected, expected_ids = undisturbed
    for _ in range(TRIES):
        until_whole(twins, {**TWINS, "kvstore": 1})
        session = f"twice-{next(_serial)}"
        victims = Victims(twins, "decode")
        calls = twins.client.chat(MESSAGE, session, max_tokens=ANSWER_TOKENS, **NEVER_ENDS, **parameters)
        for number, part in enumerate(calls):
            if number in (10, 90):
                victims.kill_busy()
            if isinstance(part, Turn):
                assert part.text == expected.text
        assert token_ids(twins, session) == expected_ids
        if len(victims.killed) == 2:
            break
    assert len(victims.killed) == 2


def test_prefill_dies_while_it_computes(
    twins: Stack, undisturbed: tuple[dict[str, float], Turn, list[int]]
) -> None:
    """The prompt is long, and each death is as early as a job can be seen."""
    parameters, _, _ = undisturbed
    words = " ".join(f"My friend number {i} likes the colour blue." for i in range(60))
    plain = twins.client.say(words, f"long-{next(_serial)}", reuse=False, max_tokens=40, **parameters)
    victims = Victims(twins, "prefill")

    def kill_when_at_work(done: threading.Event) -> None:
        while not victims.kill_busy() and not done.is_set():
            pass

    for _ in range(TRIES):
        done = threading.Event()
        killer = threading.Thread(target=kill_when_at_work, args=(done,))
        killer.start()
        try:
            session = f"long-{next(_serial)}"
            turn = twins.client.say(words, session, reuse=False, max_tokens=40, **parameters)
        finally:
            done.set()
            killer.join()
        assert turn.text == plain.text
        if victims.killed:
            break
    assert victims.killed, "none was at work"


@pytest.mark.parametrize(
    ("tables", "at_piece"),
    [
        # Decode has room for a part of the sequence only: the rest lies on a pool.
        pytest.param(slow_tables(decode={"capacity_tokens": 160}), 120, id="a pool"),
        # All KV is on a group: the sequence is computed again once the part is back.
        pytest.param(
            {**slow_tables(decode={"placement": "offload"}), "up": {"heads": True}},
            40,
            id="a part of a head group",
        ),
    ],
)
@pytest.mark.parametrize("sampling", ["sampled", "greedy"])
@pytest.mark.slow
def test_borrowed_memory_dies_with_its_holder(
    tmp_path: Path, slow_model: Path, tables: dict[str, dict[str, object]], at_piece: int, sampling: str
) -> None:
    stack = Stack(tmp_path, tables=tables, model=str(slow_model), attention_pool=2)
    with stack:
        expected, _ = stream(stack, "calm", MESSAGE, reuse=False, **SAMPLINGS[sampling])
        victims = Victims(stack, "attention_pool")
        for _ in range(TRIES):
            session = f"killed-{next(_serial)}"
            turn, silence_s = stream(
                stack, session, MESSAGE, victims.kill_busy, at_piece=at_piece, **SAMPLINGS[sampling]
            )
            if victims.killed:
                break
        assert victims.killed, "none was at work"
        assert turn.text == expected.text
        assert token_ids(stack, session) == token_ids(stack, "calm")
        assert silence_s < DELAY_S_MAX
        until_whole(stack, {"attention_pool": 2})
        stack.assert_no_block_is_held()
    stack.assert_gone()


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One instance of each, and little patience."""
    deadlines = {
        "request_deadline_s": 8.0,
        "resume_deadline_s": 5.0,
        "stall_s": 2.0,
        "commit_deadline_s": 3.0,
    }
    own = Stack(tmp_path_factory.mktemp("single"), tables={**FLOAT32, "router": deadlines}, attention_pool=0)
    with own:
        yield own
    own.assert_gone()


@pytest.mark.parametrize(
    "alone", [*(pytest.param(one, marks=pytest.mark.slow) for one in ("prefill", "decode")), "kvstore"]
)
def test_an_instance_that_is_alone_and_stays_away(single: Stack, alone: str) -> None:
    """A paused process is one that does not come back: the request ends with a clear error within its
    deadline, and all is well again once the process goes on."""
    session = f"kept-without-{alone}"
    single.until(single.client.healthy, 60.0, "the stack is not healthy")
    before = single.client.say("My cat is called Zuzu.", session, temperature=0)
    assert before.text
    pause(single.pid(alone))
    began = time.monotonic()
    try:
        with pytest.raises(KVCommonsError) as failure:
            single.client.say("What is my cat called?", session, temperature=0)
        assert time.monotonic() - began < scaled(60.0)
        assert failure.value.http_status in (429, 503)
        assert failure.value.message
    finally:
        single.kill(alone, signal.SIGCONT)
    single.until(single.client.healthy, 60.0, "the stack is not healthy again")
    after = single.client.say("What is my cat called?", session, temperature=0)
    assert "Zuzu" in after.text
    single.assert_no_block_is_held()
