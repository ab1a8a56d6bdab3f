"""The benchmark of prefixes on real stacks: what it asks for, and what it makes of the answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.prefixes import Answered, Trial, Workload, summarise
from kvcommons.errors import Internal

LOAD = Workload(
    prefixes=4,
    capacity=(2, 3, 0),
    requests=40,
    waiting=7,
    running=1,
    prefix_tokens=512,
    new_tokens=16,
    answer_tokens=1,
    vocab_size=1000,
    token_bytes=1 << 14,
    overtakes_max=32,
    look_ahead=8,
    skew=0.0,
)
ANSWER = Answered(
    took_s=1.0,
    ended_s=0.0,
    prompt_tokens=528,
    cached_tokens=512,
    device_tokens=256,
    running_s=1.0,
    compute_s=0.5,
    load_wait_s=0.1,
    decode_s=0.2,
)


def trial(policy: str, ends_s: list[float], cpu_s: float = 10.0) -> Trial:
    answers = [replace(ANSWER, ended_s=end_s) for end_s in ends_s]
    return Trial(policy=policy, round=0, full=LOAD.requests - LOAD.clients, cpu_s=cpu_s, answers=answers)


def test_requests_share_prefixes_and_nothing_else() -> None:
    prompts = LOAD.prompts(seed=3)
    assert prompts == LOAD.prompts(seed=3) != LOAD.prompts(seed=4)
    assert {len(prompt) for prompt in prompts} == {528}
    assert len({tuple(prompt[:512]) for prompt in prompts}) == LOAD.prefixes
    assert len({tuple(prompt[512:]) for prompt in prompts}) == LOAD.requests


def test_the_stack_has_room_for_so_many_prefixes() -> None:
    tables = LOAD.tables("bounded_fpf", "bfloat16")
    assert tables["prefill"]["capacity_tokens"] == 2 * 9 * 64, "with the blocks of a request's own"
    assert tables["kvstore"] == {"dram_bytes": 3 * 512 << 14, "disk_bytes": 0}
    assert (tables["router"]["max_running"], tables["router"]["max_queue"]) == (1, 8)


def test_rates_are_of_all_and_of_the_time_in_which_the_queue_was_full() -> None:
    """32 were answered when the last of 40 was sent: the first eight and the last eight take long."""
    slow, fast = [10.0 * (number + 1) for number in range(8)], [80.0 + number + 1 for number in range(24)]
    ends_s = [*slow, *fast, *(104.0 + 10 * (number + 1) for number in range(8))]
    one = trial("fcfs", ends_s)
    assert one.requests_per_s == pytest.approx(40 / 184)
    assert one.full_requests_per_s == pytest.approx(1.0)
    never_full = replace(one, full=0)
    assert never_full.full_requests_per_s == never_full.requests_per_s


def test_the_report_compares_what_happened_in_one_round() -> None:
    ends_s = [float(number + 1) for number in range(40)]
    twice = [end_s / 2 for end_s in ends_s]
    report = summarise("title", [trial("fcfs", ends_s), trial("fpf", twice, cpu_s=4.0)])
    assert report.ratios == pytest.approx({"fpf": 2.0, "fpf, queue full": 2.0, "fpf, by CPU seconds": 2.5})
    row = report.rows[1]
    assert (row["policy"], row["requests"], row["requests/s"]) == ("fpf", 40, 2.0)
    shares = [row[f"{where} %"] for where in ("from device", "from the store", "computed")]
    assert shares == pytest.approx([100 * 256 / 528, 100 * 256 / 528, 100 * 16 / 528])
    assert row["rest s"] == pytest.approx(40 * 0.2)


def test_a_stack_that_reuses_nothing_measures_nothing() -> None:
    cold = [replace(ANSWER, cached_tokens=0, device_tokens=0, ended_s=1.0)]
    with pytest.raises(Internal, match="no request found its prefix"):
        summarise("title", [Trial(policy="fcfs", round=0, full=0, cpu_s=1.0, answers=cold)])
