from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks.replay.cli import TOKEN_BYTES, main
from benchmarks.replay.hierarchy import Capacity
from benchmarks.replay.replay import Setting, replay
from benchmarks.replay.sharegpt import ShareGpt, generate
from benchmarks.replay.trace import Job, Trace, read_trace
from kvcommons.errors import InvalidInput

TRACES = Path(__file__).parents[3] / ".." / "shared" / "traces"
MOONCAKE = TRACES / "mooncake_conversation_trace.jsonl"


@pytest.fixture(scope="module")
def mooncake() -> Trace:
    if not MOONCAKE.exists():
        pytest.skip("Mooncake's conversation trace is not beside the repository (shared/traces)")
    return read_trace(MOONCAKE)


@pytest.mark.parametrize(
    ("policy", "blocks", "share"),
    [
        ("lru", 5000, 0.112),
        ("lru", 10_000, 0.212),
        ("belady", 5000, 0.339),
        pytest.param("belady", 10_000, 0.366, marks=pytest.mark.slow),
    ],
)
def test_known_figures_come_out(mooncake: Trace, policy: str, blocks: int, share: float) -> None:
    outcome = replay(mooncake, policy, Setting(capacity=Capacity(dram_blocks=blocks)))
    assert round(outcome.block_hit_rate, 3) == share


@pytest.mark.parametrize(
    ("look_ahead", "blocks", "at_least"),
    [
        (1024, 5000, 0.302),
        pytest.param(0, 10_000, 0.23, marks=pytest.mark.slow),
        pytest.param(0, 5000, 0.165, marks=pytest.mark.slow),
        pytest.param(256, 5000, 0.22, marks=pytest.mark.slow),
        pytest.param(256, 10_000, 0.268, marks=pytest.mark.slow),
        pytest.param(1024, 10_000, 0.323, marks=pytest.mark.slow),
    ],
)
def test_the_scheduler_aware_policy_on_a_real_trace(
    mooncake: Trace, look_ahead: int, blocks: int, at_least: float
) -> None:
    setting = Setting(capacity=Capacity(dram_blocks=blocks), look_ahead=look_ahead)
    assert replay(mooncake, "scheduler-aware", setting).block_hit_rate >= at_least


def test_the_generated_sessions_have_the_published_statistics() -> None:
    trace = generate(ShareGpt(sessions=4000))
    last: dict[int, int] = {}
    turns: dict[int, int] = {}
    for job in trace.jobs:
        if job.run:
            session = job.run[0] >> 24
            last[session] = job.tokens
            turns[session] = turns.get(session, 0) + 1
    assert len(trace.jobs) / 4000 == pytest.approx(5.75, rel=0.06)
    assert sum(tokens > 2048 for tokens in last.values()) / 4000 == pytest.approx(0.47, abs=0.03)
    assert sum(tokens > 4096 for tokens in last.values()) / 4000 == pytest.approx(0.30, abs=0.03)
    assert sum(count > 1 for count in turns.values()) / 4000 == pytest.approx(0.73, abs=0.04)


@pytest.mark.parametrize(
    ("part", "block_tokens"),
    # A quarter of the machine and of its sessions in coarse blocks: DRAM still holds several of the longest.
    [(4, 512), pytest.param(1, 64, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])],
)
def test_in_the_proportions_of_figure_21_the_queue_is_worth_25_points(part: int, block_tokens: int) -> None:
    """128 GiB, 10 TiB and 9,000 sessions of a 13B model, or a part of each."""
    trace = generate(ShareGpt(sessions=9000 // part, block_tokens=block_tokens))
    block_bytes = block_tokens * TOKEN_BYTES * part
    capacity = Capacity(dram_blocks=(128 << 30) // block_bytes, disk_blocks=(10 << 40) // block_bytes)
    lru, aware = (
        replay(trace, policy, Setting(capacity=capacity, warm_up=10_000 // part))
        for policy in ("lru", "scheduler-aware")
    )
    assert aware.block_hit_rate >= lru.block_hit_rate + 0.25
    assert aware.dram_share_of_hits > 0.99


def test_a_request_hits_that_finds_all_that_had_come_before() -> None:
    runs = [(0, 1), (0, 1, 2), (5,), (0, 9)]
    jobs = [Job(run=run, tokens=16 * len(run), arrive_s=n, start_s=n) for n, run in enumerate(runs)]
    trace = Trace(name="four", jobs=jobs, block_tokens=16)
    for blocks, share in ((8, 0.5), (1, 0.0)):
        outcome = replay(trace, "lru", Setting(capacity=Capacity(dram_blocks=blocks)))
        assert outcome.request_hit_rate == share


def test_a_session_shorter_than_a_block_uses_none() -> None:
    trace = generate(ShareGpt(sessions=40, block_tokens=16_384))
    setting = Setting(capacity=Capacity(dram_blocks=4, disk_blocks=8))
    for policy in ("scheduler-aware", "attention-store"):
        assert replay(trace, policy, setting).requests == len(trace.jobs)


def test_the_command_prints_one_result_a_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 1000 * n, "input_length": 1500, "hash_ids": [0, n % 2 + 1, 3 + n]} for n in range(6)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    picture = tmp_path / "picture.png"
    arguments = [str(trace), "--dram-blocks", "4", "--disk-blocks", "2", "--policy", "lru", "fifo", "--json"]
    assert main([*arguments, "--picture", str(picture)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["policy"] for row in result["results"]] == ["lru", "fifo"]
    for row in result["results"]:
        assert row["block_hit_rate"] == pytest.approx(row["dram_hit_rate"] + row["disk_hit_rate"], abs=1e-5)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_generated_workload_is_replayed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["sharegpt", "--sessions", "40", "--dram", "1G", "--disk", "8G", "--policy", "lru", "slru"]
    assert main([*arguments, "--block-tokens", "256"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("slru", "of reusable", "written GiB"))
    assert "…" not in printed


def test_times_to_live_come_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 400_000 * n, "input_length": 512, "hash_ids": [n % 2]} for n in range(8)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [str(trace), "--dram-blocks", "4", "--policy", "lru", "--json"]
    assert main([*arguments, "--ttl", "300", "86400"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [(row["ttl_s"], row["misses"]) for row in results] == [(300.0, 8), (86_400.0, 2)]


def test_runs_of_sessions_are_local_to_them(tmp_path: Path) -> None:
    path = tmp_path / "sessions.jsonl.gz"
    rows = [
        {"session": name, "t": t, "input_length": 200, "block_tokens": 64, "hash_runs": [[1, 2], [7, 1]]}
        for name, t in (("a", 0.0), ("b", 5.0), ("a", 9.0))
    ]
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    outcome = replay(read_trace(path), "lru", Setting(capacity=Capacity(dram_blocks=100)))
    assert (outcome.blocks, outcome.misses) == (9, 6)
    assert outcome.token_hit_rate == pytest.approx(192 / 600, abs=1e-6)
    late = replay(read_trace(path), "lru", Setting(capacity=Capacity(dram_blocks=100), ttl_s=5.0))
    assert late.misses == 9


@pytest.mark.parametrize("text", ["", "{}\n", "not json\n", '{"hash_ids": [1]}\n'])
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidInput, match="trace"):
        read_trace(path)
