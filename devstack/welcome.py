"""The short conversation that a stack holds with itself once it is up: its proof that it works.

It tells a name, asks for it, and shows how much of the second turn's prompt came from cache. A later start
finds the session again and asks once more: what it then answers survived the processes that heard it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from devstack.rest import RestClient, Turn
from kvcommons.errors import KVCommonsError, SessionNotFound

SESSION = "welcome"
FACT = "My cat is called Zuzu."
ASKED = "What is my cat called?"
# An answer of the demo model is a sentence; others may ramble.
ANSWER_TOKENS_MAX = 48
# Past this the conversation begins anew: it must not fill the context window one start at a time.
SESSION_TOKENS_MAX = 800


class Welcome:
    """Runs the conversation against `client`, telling it to `say` line by line."""

    def __init__(self, client: RestClient, say: Callable[[str], None]) -> None:
        self._client = client
        self._say = say

    def hold(self) -> None:
        """Raises the error of a turn that fails."""
        known = self._known()
        if known is not None:
            try:
                self._go_on(known)
                return
            except KVCommonsError as error:
                # Told with another model or block size, or too long by now.
                self._say(
                    f"The conversation of an earlier run cannot go on ({error.message}); here is a new one."
                )
            self._client.delete_session(SESSION)
        self._begin()

    def _known(self) -> dict[str, Any] | None:
        try:
            record: dict[str, Any] = self._client.session(SESSION)
        except SessionNotFound:
            return None
        if len(record.get("messages") or ()) < 2 or _tokens(record) > SESSION_TOKENS_MAX:
            self._client.delete_session(SESSION)
            return None
        return record

    def _begin(self) -> None:
        self._say("A first conversation:")
        self._turn(FACT)
        self._prove(self._turn(ASKED))

    def _go_on(self, record: dict[str, Any]) -> None:
        turn = self._ask(ASKED)
        messages = len(record["messages"])
        self._say(f"The conversation of an earlier run is still there ({messages} messages). It goes on:")
        self._show(ASKED, turn)
        self._prove(turn)

    def _turn(self, message: str) -> Turn:
        turn = self._ask(message)
        self._show(message, turn)
        return turn

    def _ask(self, message: str) -> Turn:
        return self._client.say(message, SESSION, temperature=0, max_tokens=ANSWER_TOKENS_MAX)

    def _show(self, message: str, turn: Turn) -> None:
        self._say(f"    you    {message}")
        self._say(f"    model  {turn.text.strip()}")

    def _prove(self, turn: Turn) -> None:
        self._say(
            f"    {turn.cached_tokens} of {turn.prompt_tokens} prompt tokens came from cache;"
            f" first token after {turn.ttft_s * 1000:.0f} ms"
        )


def _tokens(record: dict[str, Any]) -> int:
    tokens = record.get("tokens", 0)
    return len(tokens) if isinstance(tokens, list) else int(tokens)
