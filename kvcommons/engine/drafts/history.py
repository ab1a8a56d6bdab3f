"""What a tenant's answers were, for drafts of the next ones: agents of one tenant write the same files, call
the same functions and begin their answers alike, in different sessions. Pure.

Answers stand one behind the other in one text, whose older half is dropped when it is full. Tenants never see
each other's. A token takes eight bytes.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from kvcommons.engine.drafts.index import DraftIndex, Match

BREAK = -1  # between two answers: no token is drafted from the one before it
TENANT_TOKENS = 1 << 16
TENANTS = 64  # whose answers are kept: those who generated last
_CONTEXT = 8  # tokens of the prompt's end that an answer is kept with, so that its beginning is found


class _Answers:
    """Of one tenant."""

    def __init__(self) -> None:
        self._text = array("i")
        self._index = DraftIndex(self._text, TENANT_TOKENS)

    def add(self, answer: Sequence[int]) -> None:
        self._text.extend([BREAK, *answer[-TENANT_TOKENS // 2 :]])
        if len(self._text) > TENANT_TOKENS:
            self._text = self._text[-TENANT_TOKENS // 2 :]
            self._index = DraftIndex(self._text, TENANT_TOKENS)
        else:
            self._index.extend(self._text)

    def longest(self, tail: Sequence[int]) -> Match:
        return self._index.longest(self._text, tail)

    def copied(self, match: Match, count: int) -> list[int]:
        end = self._text[match.end : match.end + count].tolist()
        return end[: end.index(BREAK)] if BREAK in end else end


class AnswerHistory:
    """Of all tenants whom an engine has served."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, _Answers] = OrderedDict()

    def add(self, tenant: str, tokens: Sequence[int], prompt_tokens: int) -> None:
        """A sequence has ended: what is behind its prompt was its answer."""
        if len(tokens) <= prompt_tokens:
            return
        answers = self._tenants.get(tenant)
        if answers is None:
            answers = self._tenants[tenant] = _Answers()
        self._tenants.move_to_end(tenant)
        answers.add(tokens[max(prompt_tokens - _CONTEXT, 0) :])
        while len(self._tenants) > TENANTS:
            self._tenants.popitem(last=False)

    def drafts(self, tenant: str, tokens: Sequence[int], most: int) -> tuple[int, list[int]]:
        """The length of the longest match of the last tokens in the tenant's answers, and at most so many
        tokens that followed it."""
        answers = self._tenants.get(tenant)
        if answers is None or not (match := answers.longest(tokens)).length:
            return 0, []
        return match.length, answers.copied(match, most)
