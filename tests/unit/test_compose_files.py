"""What compose.yaml and compose.database.yaml say of each container, where no engine has to answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SERVICES: dict[str, dict[str, Any]] = {}
for name in ("compose.yaml", "compose.database.yaml"):
    for service, said in yaml.safe_load((ROOT / name).read_text())["services"].items():
        SERVICES[service] = {**SERVICES.get(service, {}), **said}


def test_every_service_is_there() -> None:
    kinds = {"router", "prefill", "decode", "attention_pool", "kvstore", "ledger"}
    assert SERVICES.keys() == {*kinds, "etcd", "postgres"}


@pytest.mark.parametrize("service", sorted(SERVICES))
def test_a_container_is_bounded_and_confined(service: str) -> None:
    said = SERVICES[service]
    assert said["mem_limit"]
    assert said["pids_limit"] <= 1024
    assert said["logging"] == {"driver": "json-file", "options": {"max-size": "10m", "max-file": "3"}}
    assert said["read_only"]
    assert said["cap_drop"] == ["ALL"]
    assert said["security_opt"] == ["no-new-privileges:true"]


@pytest.mark.parametrize("service", sorted(SERVICES))
def test_only_the_router_can_be_reached_from_elsewhere(service: str) -> None:
    said = SERVICES[service]
    entrance = service == "router"
    assert said["networks"] == (["front", "services"] if entrance else ["services"])
    assert ("ports" in said) is entrance
    if entrance:
        assert said["ports"] == ["${KVCOMMONS_BIND:-127.0.0.1}:${KVCOMMONS_PORT:-8000}:8000"]


def test_etcd_has_a_bounded_history_and_size() -> None:
    text = (ROOT / "Dockerfile").read_text()
    for flag in ("--auto-compaction-retention=1000", "--quota-backend-bytes=268435456"):
        assert flag in text
