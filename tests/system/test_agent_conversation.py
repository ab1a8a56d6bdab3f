"""A recorded conversation of a coding agent, sent to whole stacks: what of it is found in cache, with its
lines that change with each request where they are, and with them moved."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.agent_conversation import recorded_requests
from tests.machine import scaled
from tests.system.conftest import FLOAT32, LOADS
from tests.system.stack import Stack

BLOCK_TOKENS = 16
# What stands behind the last block of a prompt that the next one repeats: the moved lines, and the opening of
# an answer.
TAIL_TOKENS = 110


@pytest.fixture(scope="module")
def moving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    # What is found is loaded: on a busy machine computing the last blocks of a short prompt is quicker.
    tables = {
        **FLOAT32,
        "prefill": {**FLOAT32["prefill"], **LOADS},
        "router": {"volatile_lines": "move"},
    }
    with Stack(tmp_path_factory.mktemp("moving"), tables=tables) as stack:
        yield stack
    stack.assert_gone()


def prompt_and_cached(
    stack: Stack, *, session: str | None = None
) -> dict[str, list[tuple[int, int, str | None]]]:
    """By agent, of each request: tokens of its prompt, those that were found, and where it was kept. Without
    a `session` its header is left out."""
    found: dict[str, list[tuple[int, int, str | None]]] = {}
    with anthropic.Anthropic(base_url=stack.url, api_key="none", max_retries=0, timeout=scaled(60)) as claude:
        for request in recorded_requests():
            body: dict[str, Any] = dict(request.body)
            temperature = body.pop("temperature")
            headers = {**request.headers, "x-claude-code-session-id": session or ""}
            if session is None:
                del headers["x-claude-code-session-id"]
            reply = claude.messages.with_raw_response.create(
                **body, extra_headers=headers, extra_body={"temperature": temperature}
            )
            usage = reply.parse().usage
            cached = usage.cache_read_input_tokens or 0
            kept_in = reply.headers.get("X-Session-ID")
            found.setdefault(request.agent, []).append((usage.input_tokens + cached, cached, kept_in))
    return found


def test_moved_lines_leave_the_history_in_cache(moving: Stack) -> None:
    for turns in prompt_and_cached(moving).values():
        assert len(turns) > 1
        for (before, _, _), (_, cached, kept_in) in itertools.pairwise(turns):
            assert cached >= before - TAIL_TOKENS
            assert kept_in is None


def test_kept_lines_leave_nothing_behind_them_in_cache(stack: Stack) -> None:
    """And no session either, which would begin otherwise each time."""
    for turns in prompt_and_cached(stack, session="agents-kept").values():
        (_, _, first_kept_in), *rest = turns
        assert first_kept_in is not None
        for prompt, cached, kept_in in rest:
            assert cached <= 2 * BLOCK_TOKENS, "it changes in the first line"
            assert prompt > 20 * BLOCK_TOKENS
            assert kept_in is None


def test_a_live_agent_finds_all_that_its_session_has(moving: Stack) -> None:
    """It acts on the model's own calls, which it writes back in its own spacing, and is told the time anew
    with each request: what the session has is found, to the last whole block."""
    tools: list[Any] = [
        {
            "name": "look",
            "input_schema": {
                "type": "object",
                "properties": {"kind": {"enum": ["cat", "dog"]}},
                "required": ["kind"],
                "additionalProperties": False,
            },
        }
    ]
    messages: list[Any] = [{"role": "user", "content": "My cat is called Zuzu. Look at it."}]
    stored = 1
    with anthropic.Anthropic(
        base_url=moving.url, api_key="none", max_retries=0, timeout=scaled(60)
    ) as claude:
        for turn in range(4):
            reply = claude.messages.with_raw_response.create(
                model="kvcommons-demo",
                max_tokens=60,
                system=f"Be kind.\nCurrent time: 2026-11-24T09:15:0{turn}Z",
                tools=tools,
                tool_choice={"type": "any", "disable_parallel_tool_use": True},
                messages=messages,
                extra_headers={"x-claude-code-session-id": "live", "x-claude-code-agent-id": "one"},
                extra_body={"temperature": 0},
            )
            message = reply.parse()
            assert reply.headers["X-Session-ID"] == "live~@one"
            assert reply.headers["X-Volatile-Lines"] == "moved 1"
            assert message.stop_reason == "tool_use"
            cached = message.usage.cache_read_input_tokens or 0
            assert cached >= (stored - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            stored = moving.client.session("live~@one")["tokens"]
            calls = [block for block in message.content if block.type == "tool_use"]
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": "It sleeps."} for call in calls
            ]
            messages += [
                {"role": "assistant", "content": [block.model_dump() for block in message.content]},
                {"role": "user", "content": results},
            ]
    assert stored > 10 * BLOCK_TOKENS
