"""A tenant's answers are found again by the tenant, and by nobody else."""

from __future__ import annotations

from kvcommons.engine.drafts.history import TENANT_TOKENS, TENANTS, AnswerHistory

PROMPT = [1, 2, 3, 4]
ANSWER = [*range(100, 150)]


def history() -> AnswerHistory:
    made = AnswerHistory()
    made.add("ours", [*PROMPT, *ANSWER], len(PROMPT))
    return made


def test_what_followed_in_an_earlier_answer_is_drafted() -> None:
    known = history()
    assert known.drafts("ours", [7, 7, 110, 111, 112], 4) == (3, [113, 114, 115, 116])
    assert known.drafts("ours", [9, 3, 4], 3) == (2, [100, 101, 102]), "and so is an answer's beginning"
    assert known.drafts("ours", [110, 112], 4) == (0, [])


def test_nobody_elses_answers_are_looked_at() -> None:
    assert history().drafts("theirs", [110, 111, 112], 4) == (0, [])


def test_a_draft_ends_where_its_answer_did() -> None:
    known = history()
    known.add("ours", [*PROMPT, 5, 6, 7], len(PROMPT))
    assert known.drafts("ours", [147, 148], 4) == (2, [149])
    assert known.drafts("ours", [148, 149], 4) == (2, [])


def test_the_newest_of_several_answers_counts() -> None:
    known = history()
    known.add("ours", [*PROMPT, 110, 111, 5], len(PROMPT))
    assert known.drafts("ours", [110, 111], 1) == (2, [5])


def test_prompts_and_answers_without_tokens_are_not_kept() -> None:
    known = AnswerHistory()
    known.add("ours", ANSWER, len(ANSWER))
    assert known.drafts("ours", ANSWER[:5], 4) == (0, [])


def test_what_is_kept_is_bounded() -> None:
    """Of a tenant the newer answers, of tenants those who were last."""
    known = AnswerHistory()
    for number in range(40):
        known.add("ours", [-2, *range(number * 10_000, number * 10_000 + TENANT_TOKENS // 16)], 1)
    assert known.drafts("ours", [390_000, 390_001], 1) == (2, [390_002])
    assert known.drafts("ours", [10_000, 10_001], 1) == (0, [])
    long = [*range(3 * TENANT_TOKENS)]
    known.add("ours", long, 0)
    assert known.drafts("ours", long[-3:-1], 1) == (2, [long[-1]])
    for number in range(TENANTS):
        known.add(str(number), ANSWER, 0)
    assert known.drafts("ours", long[-3:-1], 1) == (0, [])
    assert known.drafts("0", ANSWER[:2], 1) == (2, [ANSWER[2]])
