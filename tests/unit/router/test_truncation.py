"""What goes, what is in sight then, and what a replay has to compute."""

from __future__ import annotations

import random

import pytest

from kvcommons.pb.common_pb2 import ModelInfo
from kvcommons.rblock.identity import IdentityChain, block_id
from services.router.sessions.truncation import (
    Context,
    Truncation,
    answer_tokens_of,
    recomputed,
    replay_costs,
    truncation_for,
)

BLOCK = 4
SALT = bytes(32)
MODEL = ModelInfo(fingerprint=b"m" * 32, block_tokens=BLOCK)


def context(tokens: int, *truncations: Truncation) -> Context:
    return Context(salt=SALT, model=MODEL, tokens=range(tokens), truncations=truncations)


def cut(at: int, head: int, dropped: int) -> Truncation:
    return Truncation(at_token=at, head_tokens=head, dropped_tokens=dropped)


def plain(tokens: list[int]) -> list[bytes]:
    return IdentityChain(SALT, MODEL.fingerprint, BLOCK).extend(tokens)


def ask(**changes: int | float) -> Truncation | None:
    known = {
        "kept_tokens": 100, "dropped_tokens": 0, "head_tokens": 8, "new_tokens": 10, "answer_tokens": 10,
        "window": 128, "ratio": 0.5, "block_tokens": BLOCK,
    }  # fmt: skip
    return truncation_for(**{**known, **changes})  # type: ignore[arg-type]


def test_identities_that_are_known_are_not_computed_again() -> None:
    ids = context(64).now.ids
    known = [ids[0], b"2".ljust(32), b"3".ljust(32)]  # nobody could compute these
    went_on = Context(salt=SALT, model=MODEL, tokens=range(64), known_ids=known).now.ids
    assert went_on[:3] == known
    assert went_on[3] == block_id(SALT, MODEL.fingerprint, known[2], range(3 * BLOCK, 4 * BLOCK))
    assert Context(salt=SALT, model=MODEL, tokens=range(64), known_ids=ids[:2]).now.ids == ids


def test_identities_of_another_secret_or_model_or_of_before_a_truncation_are_computed_anew() -> None:
    ids, known = context(64).now.ids, [b"1".ljust(32), b"2".ljust(32)]
    assert Context(salt=SALT, model=MODEL, tokens=range(64), known_ids=known).now.ids == ids
    one, known = cut(3 * BLOCK, 0, BLOCK), [ids[0], b"2".ljust(32)]
    truncated = Context(salt=SALT, model=MODEL, tokens=range(64), truncations=[one], known_ids=known)
    assert truncated.now.ids == context(64, one).now.ids


def test_nothing_goes_while_all_fits() -> None:
    assert ask(new_tokens=18) is None
    assert ask(new_tokens=19) is not None


def test_a_share_of_the_window_goes_or_what_the_turn_needs() -> None:
    assert ask(new_tokens=19) == cut(96, 8, 64)
    assert ask(new_tokens=19, ratio=0.01) == cut(96, 8, BLOCK)
    assert ask(new_tokens=100, ratio=0.01) == cut(96, 8, 84)
    assert ask(new_tokens=1000) == cut(96, 8, 88)  # all that is complete


def test_only_complete_blocks_after_the_head_go() -> None:
    """Of n tokens the last has no KV."""
    assert ask(kept_tokens=129, new_tokens=1) == cut(128, 8, 64)
    assert ask(kept_tokens=128, new_tokens=1) == cut(124, 8, 64)
    assert ask(kept_tokens=128, head_tokens=124) is None


def test_the_second_one_counts_from_where_the_session_is() -> None:
    assert ask(new_tokens=19, dropped_tokens=64) == cut(160, 8, 64)


def test_an_answer_without_a_bound_wants_a_share_of_the_window() -> None:
    assert answer_tokens_of(None, 4096) == 512
    assert answer_tokens_of(7, 4096) == 7


def test_without_truncations_a_context_is_the_plain_prompt() -> None:
    whole = context(18)
    assert list(whole.now.tokens) == list(range(18))
    assert list(whole.now.ids) == plain(list(range(18)))
    assert whole.now.message() is None
    assert not whole.truncated


def test_what_is_left_keeps_its_identities_and_what_follows_has_new_ones() -> None:
    before, after = context(25), context(30, cut(24, 8, 12))
    now = after.now
    assert list(now.tokens) == [*range(8), *range(20, 30)]
    assert list(now.ids[:3]) == [*before.now.ids[:2], before.now.ids[5]]
    assert not set(now.ids[3:]) & set(context(30).now.ids)
    assert not set(now.ids) & set(plain(list(now.tokens))[2:])
    assert (now.since_token, now.dropped_tokens) == (12, 12)
    message = now.message()
    assert message is not None
    assert list(message.block_ids) == list(now.ids[:3])
    # Prefill and decode make the following identities of that.
    chain = IdentityChain(SALT, MODEL.fingerprint, BLOCK, parent=message.parent, ids=message.block_ids)
    chain.extend(now.tokens[chain.tokens :])
    assert chain.ids == list(now.ids) == after.chain().ids
    assert after.chain().extend([7, 8]) == chain.extend([7, 8])


@pytest.mark.parametrize("other", [cut(24, 8, 8), cut(24, 4, 12), cut(20, 8, 12)])
def test_another_truncation_gives_other_identities(other: Truncation) -> None:
    assert context(32, cut(24, 8, 12)).now.ids[-1] != context(32, other).now.ids[-1]


def test_excerpts_are_what_a_replay_computes() -> None:
    after = context(60, cut(24, 8, 12), cut(40, 8, 8))
    first, second, third = after.excerpts
    assert list(first.tokens) == list(range(24))
    assert list(second.tokens) == [*range(8), *range(20, 40)]
    assert list(third.tokens) == [*range(8), *range(28, 60)]
    assert [excerpt.since_token for excerpt in after.excerpts] == [0, 12, 20]
    assert list(second.ids[:3]) == [*first.ids[:2], first.ids[5]]
    assert list(third.ids[:5]) == [*second.ids[:2], *second.ids[4:]]
    assert after.dropped_tokens == 20


def test_a_truncation_at_zero_begins_anew() -> None:
    cuts = [cut(24, 8, 12), cut(0, 8, 8)]
    after = context(60, *cuts)
    kept = [*range(8), *range(28, 60)]
    assert len(after.excerpts) == 1
    assert list(after.now.ids) == plain(kept)
    assert after.now.message() is None
    later = context(80, *cuts, cut(60, 8, 4))
    assert list(later.now.tokens) == [*range(8), *range(32, 80)]
    assert list(later.now.ids[:9]) == [*plain(kept)[:2], *plain(kept)[3:]]
    assert later.now.since_token == 60 - 20 - 4
    assert recomputed(cuts, None) == cut(0, 8, 0)
    assert recomputed([], cut(24, 8, 12)) == cut(0, 8, 12)


def test_a_replay_begins_at_the_last_excerpt_that_can_be_computed() -> None:
    excerpts = context(60, cut(24, 8, 12), cut(40, 8, 8)).excerpts
    assert replay_costs(excerpts, [0, 0, 5]) == (2, 40 - 20)
    assert replay_costs(excerpts, [0, 0, 7]) == (2, 40 - 28)
    assert replay_costs(excerpts, [0, 5, 0]) == (1, (28 - 20) + (40 - 20))
    assert replay_costs(excerpts, [2, 2, 4]) == (0, (24 - 8) + (28 - 12) + (40 - 20))
    assert replay_costs(excerpts, [0, 0, 0]) == (0, 24 + (28 - 12) + (40 - 20))


def test_sessions_of_any_course_are_told_alike_by_all_who_chain() -> None:
    """The router's chain over all tokens, and one that grows turn by turn behind the truncations."""
    for seed in range(100):
        draw = random.Random(seed)
        truncations: list[Truncation] = []
        tokens, kept, dropped, head = 0, 0, 0, draw.randrange(4) * BLOCK
        chain = None
        for _ in range(6):
            new = draw.randrange(1, 40)
            one = truncation_for(
                kept_tokens=kept, dropped_tokens=dropped, head_tokens=head, new_tokens=new, answer_tokens=4,
                window=64,
                ratio=draw.choice([0.1, 0.5, 0.9]), block_tokens=BLOCK,
            )  # fmt: skip
            if one is not None:
                truncations.append(one)
                dropped += one.dropped_tokens
            tokens += new
            now = context(tokens, *truncations)
            assert len(now.now.tokens) == tokens - dropped
            assert now.dropped_tokens == dropped
            if one is None and chain is not None:
                chain.extend(range(tokens - new, tokens))
                assert chain.ids == list(now.now.ids)
            chain = now.chain()
            kept = tokens - dropped
