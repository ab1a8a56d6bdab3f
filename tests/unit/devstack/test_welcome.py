"""The conversation that a stack holds with itself, on a stack that is another one than it was begun on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from devstack.rest import RestClient, Turn
from devstack.welcome import Welcome
from kvcommons.errors import ModelNotFound, SessionNotFound


class _Served(RestClient):
    """Answers as a server does whose session `welcome` may be of another model: the real one needs a stack
    that is started twice (tests/system/test_up.py does that)."""

    def __init__(self, *, other_model: bool) -> None:
        super().__init__()
        self.other_model = other_model
        self.deleted = False

    def session(self, session_id: str) -> Any:
        if self.deleted:
            raise SessionNotFound("there is none")
        return {"messages": [{}, {}], "tokens": 40}

    def delete_session(self, session_id: str) -> None:
        self.deleted = True

    def say(self, message: str, session_id: str | None, **parameters: Any) -> Turn:
        if self.other_model and not self.deleted:
            raise ModelNotFound("the model 'kvcommons-demo' is not served here; served: chat")
        return Turn(
            text=f"heard {message}", session_id=str(session_id), model="m", finish_reason="stop",
            prompt_tokens=46, cached_tokens=32, completion_tokens=5, ttft_s=0.1, total_s=0.2, timings={},
        )  # fmt: skip


@pytest.mark.parametrize("other_model", [False, True])
def test_it_is_said_to_go_on_only_where_it_does(other_model: bool) -> None:
    said: list[str] = []
    say: Callable[[str], None] = said.append
    Welcome(_Served(other_model=other_model), say).hold()
    assert ("It goes on" in said[0]) is not other_model
    assert ("cannot go on" in said[0]) is other_model
    assert sum("go on" in line or "goes on" in line for line in said) == 1
    assert said[-1].strip().startswith("32 of 46")
