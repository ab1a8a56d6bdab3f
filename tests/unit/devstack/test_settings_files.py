"""The settings files that are shown and shipped hold nothing that a service would refuse."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from devstack import toml
from devstack.settings import UpSettings
from kvcommons.config import load

ROOT = Path(__file__).parents[3]
SCHEMAS = {
    "router": "RouterConfig",
    "prefill": "PrefillConfig",
    "decode": "DecodeConfig",
    "attention_pool": "AttentionPoolConfig",
    "kvstore": "KVStoreConfig",
    "ledger": "LedgerConfig",
}
# What `kvcommons up` or a container's start adds for each instance.
GIVEN = {
    "router": {"listen": "unix:/r.c", "ledger": "unix:/l.c", "model": "demo"},
    "prefill": {"listen": "unix:/p.c", "ledger": "unix:/l.c", "model": "demo"},
    "decode": {"listen": "unix:/d.c", "data_listen": "unix:/d.d", "ledger": "unix:/l.c", "model": "demo"},
    "attention_pool": {
        "listen": "unix:/a.c",
        "data_listen": "unix:/a.d",
        "ledger": "unix:/l.c",
        "model": "demo",
    },
    "kvstore": {"listen": "unix:/k.c", "data_listen": "unix:/k.d", "ledger": "unix:/l.c", "data": "/data"},
    "ledger": {"listen": "unix:/l.c", "etcd": "unix:/etcd"},
}


def schema(service: str) -> type:
    if service == "up":
        return UpSettings
    return getattr(import_module(f"services.{service}.config"), SCHEMAS[service])  # type: ignore[no-any-return]


def uncommented(path: Path) -> dict[str, dict[str, object]]:
    text = path.read_text()
    return tomllib.loads(re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE))


@pytest.mark.parametrize("service", ["up", *SCHEMAS])
def test_the_example_shows_settings_that_exist(service: str, tmp_path: Path) -> None:
    tables = uncommented(ROOT / "config/kvcommons.toml")
    tables.get("router", {}).pop("api_keys", None)  # a file that the reader has to make
    file = tmp_path / "kvcommons.toml"
    file.write_text(toml.dumps(tables))
    load(service, schema(service), file=file, environ={}, flags=GIVEN.get(service, {}))


def test_the_example_shows_all_settings_of_up() -> None:
    shown = uncommented(ROOT / "config/kvcommons.toml")["up"]
    assert shown.keys() == {field.name for field in dataclasses.fields(UpSettings)}


@pytest.mark.parametrize("service", ["up", *SCHEMAS])
def test_what_the_example_calls_defaults_are(service: str) -> None:
    """Of plain settings; the stack's own defaults for one machine are its business."""
    shown = uncommented(ROOT / "config/kvcommons.toml").get(service, {})
    given = GIVEN.get(service, {})
    loaded = load(service, schema(service), file=None, environ={}, flags=given)
    differing = {
        name: (value, getattr(loaded, name))
        for name, value in shown.items()
        if hasattr(loaded, name)
        and name
        not in (
            "api_keys",
            "cors_origins",
            "allowed_hosts",
            "model_name",
            "data",
            "dram_bytes",
            "records_password_file",
            "tls_cert",
            "tls_key",
            "tenant_key",
            *given,
        )
        if getattr(loaded, name) != value
    }
    assert differing == {}


@pytest.mark.parametrize("service", sorted(SCHEMAS))
def test_the_containers_settings_are_accepted(service: str) -> None:
    load(service, schema(service), file=ROOT / "deploy/kvcommons.toml", environ={}, flags={})
