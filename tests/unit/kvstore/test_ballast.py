"""The room that KV leaves on a disk, and the file that holds some of it until nothing else is left."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from services.kvstore import ballast
from services.kvstore.ballast import BALLAST_BYTES_MAX, Ballast, DiskReserve, free_bytes, reserve_bytes

RESERVE = 64 << 10


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "ballast"


def test_a_ballast_takes_room_until_it_is_thrown_off(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    held = Ballast(file, RESERVE)
    assert not held.throw_off(), "there is none yet"
    assert held.take_on()
    assert held.take_on(), "once is enough"
    assert [path.name for path in file.parent.iterdir()] == ["ballast"]
    assert file.stat().st_size == held.size_bytes == RESERVE // 2
    assert file.stat().st_blocks * 512 >= held.size_bytes, "a file with holes takes no room"
    assert Ballast(file, RESERVE).held, "a process that starts finds that of the one before"
    assert held.throw_off()
    assert not file.exists()
    assert "the ballast was thrown off" in caplog.text


def test_a_large_reserve_has_a_ballast_of_what_deleting_takes(file: Path) -> None:
    assert Ballast(file, 1 << 40).size_bytes == BALLAST_BYTES_MAX
    nothing = Ballast(file, 0)
    assert not nothing.take_on()
    assert not file.exists()


def test_a_ballast_that_finds_no_room_leaves_nothing_behind(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ballast.os, "posix_fallocate", full)
    assert not Ballast(file, RESERVE).take_on()
    assert list(file.parent.iterdir()) == []


def test_kv_grows_down_to_the_reserve_and_gives_room_back_below(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held = Ballast(file, RESERVE)
    reserve = DiskReserve(RESERVE, held)
    assert reserve.growth_bytes(RESERVE + 100) == 100
    assert held.held, "it is taken on as soon as there is room for it"
    in_ballast = held.size_bytes
    assert reserve.growth_bytes(RESERVE - in_ballast + 100) == 100, "what the ballast takes is of the reserve"
    for _ in range(2):
        assert reserve.growth_bytes(RESERVE - in_ballast - 100) == -100
    assert caplog.text.count("less than the reserve is free") == 1, "said once"
    held.throw_off()
    with caplog.at_level(logging.WARNING):
        assert reserve.growth_bytes(RESERVE - 1) == -1
        assert not held.held, "a ballast that was thrown off stays away until there is room"
        assert reserve.growth_bytes(RESERVE) == 0
        assert held.held
        reserve.growth_bytes(0)
    assert caplog.text.count("less than the reserve is free") == 2, "and again when it is so again"


def test_without_a_reserve_kv_takes_what_is_free() -> None:
    assert DiskReserve().growth_bytes(5) == 5


def test_a_small_file_system_keeps_most_of_itself(tmp_path: Path) -> None:
    free = free_bytes(tmp_path)
    assert reserve_bytes(tmp_path, 1000) == 1000
    assert free / 4 <= reserve_bytes(tmp_path, 1 << 62) < 1 << 62
