"""How much of a session stays when it is truncated: its system prompt, to the end of its last block."""

from __future__ import annotations

import pytest

from demo import MODEL_DIR
from kvcommons.model.chat import ChatTemplate
from kvcommons.model.tokenizer import Tokenizer
from services.router.sessions.conversation import Message
from services.router.turn.rendering import Text

TOKENIZER = Tokenizer.read(MODEL_DIR)
TEXT = Text.of(TOKENIZER, ChatTemplate.read(MODEL_DIR, TOKENIZER))
SYSTEM = Message(role="system", content="You are a friendly assistant.")
USER = Message(role="user", content="My cat is called Zuzu.")


def tokens(*messages: Message) -> list[int]:
    return TEXT.template.prompt([message.as_dict() for message in messages])


async def test_a_system_prompt_stays_whole() -> None:
    opening = len(TEXT.template.messages([SYSTEM.as_dict()]))
    for block in (1, 4, 16, opening):
        head = await TEXT.head_tokens([SYSTEM, USER], tokens(SYSTEM, USER), block)
        assert head == -(-opening // block) * block


async def test_without_one_nothing_has_to_stay() -> None:
    assert await TEXT.head_tokens([USER, SYSTEM], tokens(USER, SYSTEM), 16) == 0


@pytest.mark.parametrize("others", [[], [USER]])
async def test_several_of_them_stay_together(others: list[Message]) -> None:
    messages = [SYSTEM, Message(role="system", content="Answer in one word."), *others]
    head = await TEXT.head_tokens(messages, tokens(*messages), 1)
    assert head == len(TEXT.template.messages([message.as_dict() for message in messages[:2]]))
