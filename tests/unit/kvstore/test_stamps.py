"""Stamps of sessions: their bytes, and when they are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcommons.errors import WrongShard
from kvcommons.shards import ShardView, session_key
from services.kvstore.families import STAMPS
from services.kvstore.folder import UnknownFormat
from services.kvstore.sessions import open_sessions
from services.kvstore.shard_sessions import ShardSessions
from services.kvstore.stamps import Stamp, decode_row, encode_row

GOLDEN = Path(__file__).parents[2] / "golden"


class StandingClock:
    def now_ms(self) -> int:
        return 1_700_000_000_000

    def monotonic_s(self) -> float:
        return 0.0


def sessions(path: Path) -> ShardSessions:
    return ShardSessions(
        open_sessions(path), folder="a", default_ttl_s=0, clock=StandingClock(), draw=lambda: "1"
    )


def test_golden_stamp() -> None:
    golden = (GOLDEN / "session-stamp.bin").read_bytes()
    assert encode_row(Stamp(7, 1_234_567_890_123), 1_700_000_000_000) == golden
    assert decode_row(golden) == (Stamp(7, 1_234_567_890_123), 1_700_000_000_000)
    with pytest.raises(UnknownFormat):
        decode_row(b"\2" + golden[1:])


def test_a_shard_without_company_writes_no_stamp(tmp_path: Path) -> None:
    store = sessions(tmp_path / "s")
    store.create("t", "before", 0)
    assert store.adopt(ShardView(epoch=1, serving=("a.1",)))
    store.create("t", "alone", 0)
    assert list(store._table.items(STAMPS)) == []
    store.close()


def test_views_only_go_forward_and_survive_a_restart(tmp_path: Path) -> None:
    store = sessions(tmp_path / "s")
    view = ShardView(epoch=5, serving=("a.1", "b.1"))
    assert store.adopt(view)
    assert not store.adopt(ShardView(epoch=5, serving=("a.1",)))
    assert not store.adopt(ShardView(epoch=4, serving=("a.1",)))
    names = [f"s{number}" for number in range(40)]
    mine = next(name for name in names if view.home(session_key("t", name)) == "a.1")
    other = next(name for name in names if view.home(session_key("t", name)) == "b.1")
    store.create("t", mine, 0)
    with pytest.raises(WrongShard):
        store.create("t", other, 0)
    store.close()
    again = sessions(tmp_path / "s")
    assert again.view == view
    assert again.name == "a.1"
    assert again.stamp(session_key("t", mine)) == Stamp(5, 1)
    again.delete("t", mine)
    assert again.stamp(session_key("t", mine)) == Stamp(5, 2)  # the tombstone
    again.close()
