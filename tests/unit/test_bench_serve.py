"""Conversations of the serving benchmark: where their steps come from, and when they arrive."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.serve import Run, _over_the_better, _summarise, alike, arriving, of_trace, timed_turn
from devstack.rest import Piece, Turn
from kvcommons.errors import InvalidInput


def written(folder: Path, *rows: tuple[str, int, int, float]) -> Path:
    path = folder / "trace.jsonl"
    names = ("session", "input_length", "output_length", "think_time")
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    return path


def test_a_trace_s_turns_add_what_their_requests_had_more(tmp_path: Path) -> None:
    rows = [("a", 1000, 100, 0.0), ("a", 1500, 50, 9.0), ("b", 400, 10, 0.0), ("a", 1400, 20, 4.0)]
    first, second = of_trace(written(tmp_path, *rows), 2, scale=0.1, time_scale=0.5, window=10_000)
    assert [(step.new_tokens, step.answer_tokens, step.think_s) for step in first] == [
        (100, 10, 0.0),
        (40, 5, 4.5),
        (1, 2, 2.0),  # shorter than what was said: an edited history
    ]
    assert [step.new_tokens for step in second] == [40]


def test_a_conversation_ends_where_the_window_is_full(tmp_path: Path) -> None:
    path = written(tmp_path, ("a", 1000, 100, 0.0), ("a", 1500, 50, 9.0), ("b", 9000, 1, 0.0))
    (only,) = of_trace(path, 2, scale=1.0, time_scale=1.0, window=1200)
    assert len(only) == 1
    with pytest.raises(InvalidInput, match="--scale"):
        of_trace(path, 2, scale=10.0, time_scale=1.0, window=1200)
    with pytest.raises(InvalidInput, match="no trace of sessions"):
        of_trace(tmp_path / "none", 2, scale=1.0, time_scale=1.0, window=1200)


def test_arrivals_keep_the_rate_and_are_the_same_for_each_server() -> None:
    steps = alike(400, 3, new=8, answer=4, think_s=1.0)
    arrivals = arriving(steps, rate_per_s=2.0, seed=3)
    assert arrivals == arriving(steps, rate_per_s=2.0, seed=3)
    assert arrivals[-1].arrives_s == pytest.approx(200, rel=0.15)
    assert [step.think_s for step in arrivals[0].steps] == [0.0, 1.0, 1.0]


def run(seconds: float) -> Run:
    return Run(turns=(), failed=0, seconds=seconds)


def test_a_rate_is_compared_round_by_round_with_the_better_peer() -> None:
    def speed(run: Run) -> float:
        return 1 / run.seconds

    runs = {"kvcommons": [run(1), run(2)], "slow": [run(9), run(9)], "quick": [run(2), run(4)]}
    found = _over_the_better("speed", speed, runs)
    assert found == pytest.approx(
        {"speed over quick's": 2, "speed over quick's, low": 2, "speed over quick's, high": 2}
    )
    assert _over_the_better("speed", speed, {"kvcommons": [run(4)], "quick": [run(2)]}) == {
        "speed over quick's": 0.5
    }, "one round has no interval"
    assert _over_the_better("speed", speed, {"kvcommons": [run(4)]}) == {"speed": 0.25}
    none = {"kvcommons": [run(4)], "stuck": [run(float("inf"))]}
    assert _over_the_better("speed", speed, none) == {"speed": 0.25}, "who kept nothing is no measure"


def turn(*came_s: float) -> list[Piece | Turn]:
    """As a client hears it: a token at each of these times."""
    ended = Turn(
        text="a" * len(came_s),
        session_id="",
        model="m",
        finish_reason="length",
        prompt_tokens=10,
        cached_tokens=0,
        completion_tokens=len(came_s),
        ttft_s=came_s[0],
        total_s=came_s[-1],
        timings={},
    )
    return [*(Piece(text="a", after_s=at_s) for at_s in came_s), ended]


def test_one_stall_is_seen_however_many_tokens_came_at_once_after_it() -> None:
    even = timed_turn(turn(*(0.1 * number for number in range(1, 11))))
    stalled = timed_turn(turn(0.1, *(0.91 + 0.01 * number for number in range(9))))  # the same mean
    assert even.kept(0.2, 0.15)
    assert not stalled.kept(0.2, 0.15)
    assert not even.kept(0.05, 0.15)
    found = Run(turns=[even, stalled], failed=0, seconds=2.0)
    (row,) = _summarise("", {(1.0, "kvcommons"): [found]}, ttft_s=0.2, tbt_s=0.15).rows
    assert row["goodput turns/s"] == 0.5
    assert row["TBT p99 ms"] == pytest.approx(810)
    assert row["TBT p50 ms"] == pytest.approx(100)
    single = timed_turn(turn(0.1))
    assert single.kept(0.2, 0.0), "one token is waited for by nobody else"
