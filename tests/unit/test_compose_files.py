"""What compose.yaml and compose.database.yaml say of each container, where no engine has to answer."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from devstack import etcd
from devstack.plan import identity
from kvcommons.security.roles import name_of

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
BYTES = "--quota-backend-bytes=268435456"
SERVICES: dict[str, dict[str, Any]] = {}
for name in ("compose.yaml", "compose.database.yaml"):
    for service, said in yaml.safe_load((ROOT / name).read_text())["services"].items():
        SERVICES[service] = {**SERVICES.get(service, {}), **said}


def test_every_service_is_there() -> None:
    kinds = {"router", "prefill", "decode", "attention_pool", "kvstore", "ledger"}
    assert SERVICES.keys() == {*kinds, "certificates", "etcd", "postgres"}


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


ALONE: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]


@pytest.mark.parametrize("service", sorted(ALONE.keys() - {"certificates"}))
def test_a_service_has_its_own_certificate_and_no_other(service: str) -> None:
    said = ALONE[service]
    own = [volume for volume in said["volumes"] if "certificates" in volume or "authority" in volume]
    assert own == [f"certificates-{service}:/certificates:ro,nocopy"]
    assert said["depends_on"]["certificates"] == {"condition": "service_completed_successfully"}
    making = ALONE["certificates"]["volumes"]
    assert f"certificates-{service}:/certificates/{service}" in making
    assert f"/certificates/{service}" in DOCKERFILE  # owned by who writes there


def test_containers_know_each_other_by_certificates_and_sign_tenants() -> None:
    tables = tomllib.loads((ROOT / "deploy" / "kvcommons.toml").read_text())
    for service, table in tables.items():
        assert table["certificates"] == "/certificates"
        given = identity(service, Path("/certificates"))
        assert (
            table.get("tenant_key", "").rpartition("/")[2] == given.get("tenant_key", "").rpartition("/")[2]
        )
    assert "--client-cert-auth" in DOCKERFILE
    assert f"--client-cert-allowed-hostname={name_of('etcd-client')}" in DOCKERFILE
    assert "http://" not in DOCKERFILE


def test_etcd_has_the_bounds_of_the_one_that_up_starts() -> None:
    (line,) = re.findall(r"^CMD (\[\"etcd\".*?\])$", DOCKERFILE.replace("\\\n", " "), re.MULTILINE)
    bounds = [flag for flag in json.loads(line) if re.match("--(auto-compaction|quota)", flag)]
    here = [flag for flag in etcd.command(Path("etcd"), Path("data")) if flag in bounds]
    assert bounds == here == ["--auto-compaction-mode=revision", "--auto-compaction-retention=1000", BYTES]


def test_images_of_others_are_those_that_the_environment_names() -> None:
    """So each can be named with its digest, and nothing else is fetched than what compose.yaml says."""
    given = dict(re.findall(r"^ARG (\w+_IMAGE)=(.+)$", DOCKERFILE, re.MULTILINE))
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, re.MULTILINE)
    assert len(stages) == len(re.findall("^FROM ", DOCKERFILE, re.MULTILINE))
    ours = {name for _, name in stages}
    assert {source for source, _ in stages} - ours == {f"${{{name}}}" for name in given}
    built = [said["build"]["args"] for said in SERVICES.values() if "build" in said]
    for name, image in given.items():
        assert image in ours or re.search(r":[\w.-]+$", image), "neither a stage nor an image with a tag"
        assert {args[name] for args in built if name in args} == {f"${{{name}:-{image}}}"}
    assert all("BASE_IMAGE" in args for args in built)
