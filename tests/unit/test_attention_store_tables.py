"""The paper's tables, where they are told without a stack."""

from __future__ import annotations

import pytest

from benchmarks import attention_store
from benchmarks.attention_store import Chat, Replayed, distinct_sessions
from benchmarks.replay.sharegpt import ShareGpt, generate, session_of
from benchmarks.replay.trace import Job
from benchmarks.sessions import Pair
from devstack.rest import Turn

# A fortieth of the paper's sessions and machine.
SMALL = Replayed(sessions=225, block_tokens=256, policies=["lru", "attention-store"], think_s=600.0)


def say_nothing(text: str) -> None:
    del text


def turn(prefill_ms: float, *, prompt: int = 1000, cached: int = 0, device: int = 0) -> Turn:
    return Turn(
        text="",
        session_id="s",
        model="m",
        finish_reason="length",
        prompt_tokens=prompt,
        cached_tokens=cached,
        completion_tokens=1,
        ttft_s=prefill_ms / 1000,
        total_s=1.0,
        timings={"prefill_ms": prefill_ms - 5, "load_wait_ms": 5, "device_tokens": device},
    )


def test_waiting_for_history_counts_as_prefill() -> None:
    pairs = [Pair(source="dram", reuse=turn(ms, cached=900), compute=turn(1000)) for ms in (100, 200, 400)]
    report = attention_store.ratios({"900/100": pairs}, "m")
    assert report.ratios == pytest.approx({"prefill_900_100": 5.0})
    assert report.rows[0]["reuse ms"] == pytest.approx(200)
    assert report.rows[0]["tokens computed"] == 100


def job(session: int, start_s: float) -> Job:
    return Job(run=range(session << 24, (session << 24) + 1), tokens=16, arrive_s=0.0, start_s=start_s)


def test_sessions_are_counted_once_and_only_within_the_time() -> None:
    jobs = [job(1, 0), job(1, 10), job(2, 20), job(3, 120), job(1, 130), job(4, 300)]
    assert distinct_sessions(jobs, 101) == 2
    assert distinct_sessions(jobs, 115) == 3
    assert distinct_sessions(jobs, 1000) == 4


def test_a_session_too_short_for_a_block_is_one_all_the_same() -> None:
    trace = generate(ShareGpt(sessions=50, block_tokens=1 << 20))
    assert {session_of(job) for job in trace.jobs} == set(range(50))


def test_room_for_all_sessions_of_an_hour_misses_nothing() -> None:
    report = attention_store.capacity(SMALL, [0.05, 0.25, 1.0], say_nothing)
    for policy in SMALL.policies:
        little, some, all_of_it = (report.ratios[f"hits_{policy}_{share}"] for share in ("0.05", "0.25", "1"))
        assert little < some <= all_of_it
        assert all_of_it > 0.99


def test_each_medium_adds_hits() -> None:
    report = attention_store.mediums(SMALL, attention_store.MODELS, say_nothing)
    assert [(row["model"], row["policy"]) for row in report.rows] == [
        (model.name, policy) for model in attention_store.MODELS for policy in SMALL.policies
    ]
    for row in report.rows:
        assert float(row["device %"]) <= float(row["+ DRAM %"]) < float(row["+ disk %"])


def test_a_small_chat_keeps_the_order_and_the_proportions() -> None:
    chat = Chat(sessions=20, scale=8, answer_tokens=8, warm_up=0)
    jobs = generate(ShareGpt(sessions=20, block_tokens=16, seed=1)).jobs
    turns = chat.turns()
    assert [session for session, _ in turns] == [session_of(job) for job in jobs]
    whole = {session_of(job): job.tokens for job in jobs}
    assert sum(tokens for _, tokens in turns) == pytest.approx(sum(whole.values()) / 8, rel=0.1)
    assert chat.lengths().keys() == whole.keys()
    assert chat.longest() == max(chat.lengths().values())


def test_mediums_are_compared_by_their_prefill_time() -> None:
    report = attention_store.measured_mediums(
        "t", {"device": [turn(100), turn(300)], "+ disk": [turn(50, cached=500, device=125), turn(50)]}
    )
    assert report.ratios == pytest.approx({"prefill_device": 1.0, "prefill_disk": 0.25})
    assert report.rows[1]["tokens from cache %"] == pytest.approx(25)
    assert report.rows[1]["of them the device's %"] == pytest.approx(25)
