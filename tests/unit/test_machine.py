"""Waits are scaled by the machine's slowness, wherever they stand; nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcommons.config import DataPlane, Node
from services.decode.config import DecodeConfig
from services.kvstore.config import KVStoreConfig as KvstoreConfig
from services.ledger.config import LedgerConfig
from tests import machine
from tests.machine import SLOWNESS_MAX, scaled, scaled_settings, scaled_table


@pytest.fixture(autouse=True)
def slowness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SLOWNESS", 2.5)


def test_a_number_keeps_its_kind() -> None:
    assert (scaled(2.0), scaled(300)) == (5.0, 750)
    assert isinstance(scaled(300), int)


def test_settings_are_scaled_with_those_of_their_groups() -> None:
    config = KvstoreConfig(
        node=Node(listen="unix:/a", drain_s=4.0),
        data_plane=DataPlane(data_listen="unix:/b"),
        ledger=("unix:/c",),
        data=Path("d"),
    )
    found = scaled_settings(config)
    assert (found.node.drain_s, found.node.call_deadline_s, found.staging_s) == (10.0, 150.0, 75.0)
    assert (found.sweep_s, found.session_ttl_s, found.data) == (10.0, config.session_ttl_s, Path("d"))


def test_a_table_gets_the_defaults_too() -> None:
    found = scaled_table(DecodeConfig, {"attend_deadline_s": 0.5, "borrow_blocks": 2})
    assert (found["attend_deadline_s"], found["lease_ms"], found["drain_s"]) == (1.25, 25_000, 25.0)
    assert found["borrow_blocks"] == 2
    assert "tbt_objective_s" not in found


def test_nothing_is_scaled_beyond_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SLOWNESS", 20.0)
    config = LedgerConfig(node=Node(listen="unix:/a"), etcd=("localhost:1",))
    assert scaled_settings(config).lease_s == 60
    found = scaled_table(LedgerConfig, {})
    assert (found["lease_s"], found["etcd_timeout_s"]) == (60, 30.0)


def test_the_measured_number_is_bounded() -> None:
    assert 1.0 <= machine._measured() <= SLOWNESS_MAX


@pytest.mark.parametrize(("workers", "slowness"), [("1", 1.5), ("3", 4.5)])
def test_workers_side_by_side_make_a_machine_slower(
    monkeypatch: pytest.MonkeyPatch, workers: str, slowness: float
) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setenv(machine.VARIABLE, "1.5")
    monkeypatch.setenv(machine.WORKERS, workers)
    assert machine._slowness() == slowness
