"""The conversation of tests/recorded/agent-conversation.json: requests of a coding agent and of an agent that
it has, each with all of its history."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parent / "recorded" / "agent-conversation.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRequest:
    """To /v1/messages. `answer`: what the client was answered, as its next request has it; None for the last
    one."""

    headers: dict[str, str]
    body: dict[str, Any]
    answer: list[dict[str, Any]] | None

    @property
    def agent(self) -> str:
        """Empty for the one that began the session."""
        return self.headers.get("x-claude-code-agent-id", "")


def recorded_requests() -> list[RecordedRequest]:
    """In their order."""
    recorded = json.loads(_FILE.read_text())["requests"]
    found = []
    for at, one in enumerate(recorded):
        asked = len(one["body"]["messages"])
        agent = one["headers"].get("x-claude-code-agent-id")
        later = [
            other["body"]["messages"]
            for other in recorded[at + 1 :]
            if other["headers"].get("x-claude-code-agent-id") == agent
        ]
        answer = later[0][asked]["content"] if later else None
        found.append(RecordedRequest(headers=one["headers"], body=one["body"], answer=answer))
    return found
