"""Ids of responses: each names a place in a session, so that nothing else has to be kept of it. Pure."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass

from kvcommons.errors import NotFound

_PREFIX = "resp_"
_FORM = re.compile(r"([1-9][0-9]{0,8})(i?):(.+)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A session up to its first `messages`, of which the response is the last one. `instructed`: the first
    message is a response's instructions, which later ones do not inherit."""

    session_id: str
    messages: int
    instructed: bool

    @property
    def id(self) -> str:
        text = f"{self.messages}{'i' if self.instructed else ''}:{self.session_id}"
        return _PREFIX + base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")

    @classmethod
    def named(cls, id: str, *, param: str) -> StoredResponse:
        """Raises NotFound for the id of a response that was not stored."""
        text = id.removeprefix(_PREFIX)
        try:
            padded = text + "=" * (-len(text) % 4)
            named = base64.b64decode(padded, altchars=b"-_", validate=True).decode()
        except (binascii.Error, ValueError):
            named = ""
        found = _FORM.fullmatch(named)
        if found is None or not id.startswith(_PREFIX):
            raise NotFound(
                f"no response {id[:80]!r} is stored here: responses of requests with store false are not",
                param=param,
            )
        return cls(session_id=found[3], messages=int(found[1]), instructed=bool(found[2]))


def unstored_id(turn_id: str) -> str:
    """Of a response that is not stored."""
    return _PREFIX + turn_id


def items_id(response_id: str) -> str:
    """What ids of the response's items begin with: the same each time the response is read."""
    return response_id.removeprefix(_PREFIX)
