"""Settings: where they come from, who wins, and what a mistake is told."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, time
from pathlib import Path
from typing import Annotated, Literal

import pytest
from annotated_types import Ge

from devstack import toml
from kvcommons.config import Address, Addresses, Node, Secret, flags_of, load
from kvcommons.errors import InvalidInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    node: Node
    ledger: Addresses
    threads: Annotated[int, Ge(1)] = 1
    share: float = 0.5
    verbose: bool = False
    policy: Literal["lru", "fifo"] = "lru"
    data: Path = Path("data")
    sizes: tuple[int, ...] = ()
    peer: Address | None = None
    password: Annotated[str, Secret()] = ""

    def __post_init__(self) -> None:
        if self.share > self.threads:
            raise ValueError("share is larger than threads")


BASE = {"listen": "unix:/tmp/d.sock", "ledger": "unix:/tmp/l.sock"}


def settings(
    text: str = "", *, environ: dict[str, str] | None = None, folder: Path | None = None, **flags: str
) -> Config:
    file = None
    if folder is not None:
        file = folder / "kvcommons.toml"
        file.write_text(text)
    return load("decode", Config, file=file, environ=environ or {}, flags={**BASE, **flags})


def test_flag_beats_environment_beats_file(tmp_path: Path) -> None:
    text = "[decode]\nthreads = 2\nshare = 0.25\nverbose = true\n"
    environ = {"KVCOMMONS_DECODE__THREADS": "3", "KVCOMMONS_DECODE__SHARE": "1e-1"}
    config = settings(text, folder=tmp_path, environ=environ, threads="4")
    assert (config.threads, config.share, config.verbose, config.policy) == (4, 0.1, True, "lru")


def test_groups_are_flat_and_other_services_tables_are_left_alone(tmp_path: Path) -> None:
    text = "[decode]\ndrain_s = 3\n[router]\nanything = 1\n"
    environ = {"KVCOMMONS_ROUTER__PORT": "1", "KVCOMMONS_URL": "x", "HOME": "/"}
    config = settings(text, folder=tmp_path, environ=environ)
    assert config.node.drain_s == 3.0
    assert config.node.listen == "unix:/tmp/d.sock"


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("ledger", "unix:/a, host:1", ("unix:/a", "host:1")),
        ("ledger", '["unix:/a"]', ("unix:/a",)),
        ("sizes", "1,2", (1, 2)),
        ("sizes", "[3]", (3,)),
        ("verbose", "true", True),
        ("data", "/srv/kv", Path("/srv/kv")),
        ("peer", "", None),
        ("peer", "[::1]:80", "[::1]:80"),
        ("policy", "fifo", "fifo"),
    ],
)
def test_texts_are_parsed_by_type(field: str, text: str, value: object) -> None:
    assert getattr(settings(**{field: text}), field) == value
    environ = {f"KVCOMMONS_DECODE__{field.upper()}": text}
    flags = {name: given for name, given in BASE.items() if name != field}
    assert getattr(load("decode", Config, environ=environ, flags=flags), field) == value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[decode]\nthread = 2\n", "unknown setting 'thread' in [decode] of {file}: did you mean 'threads'?"),
        ("[decod]\n", "{file}: unknown table [decod]: did you mean 'decode'?"),
        ("threads = 2\n", "{file}: unknown table [threads]"),
        ("decode = 2\n", "{file}: decode is a table: write [decode]"),
        ('[decode]\nthreads = "2"\n', "threads = '2' in [decode] of {file}: Input should be a valid integer"),
        (
            "[decode]\nthreads = 0\n",
            "threads = 0 in [decode] of {file}: Input should be greater than or equal",
        ),
        ("[decode]\nverbose = 1\n", "verbose = 1 in [decode] of {file}: Input should be a valid boolean"),
        ("[decode]\nsizes = [1, 'x']\n", "item 1: Input should be a valid integer"),
        ("[decode]\nlisten = 'unix:d'\n", "a unix address needs an absolute path"),
        ("[decode]\nlisten = '8000'\n", 'expected "unix:/path" or "host:port"'),
        ("[decode]\nthreads = 2000-01-01\n", "dates and times are not used"),
        ("[decode]\npassword = 5\n", "password = (secret) in [decode] of {file}"),
        ("[decode\n", "the settings file {file} is not TOML"),
    ],
)
def test_mistakes_in_the_file(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as caught:
        settings(text, folder=tmp_path)
    assert says.format(file=tmp_path / "kvcommons.toml") in caught.value.message


@pytest.mark.parametrize(
    ("variable", "says"),
    [
        (
            "KVCOMMONS_DECODE__THREDS",
            "in the environment (KVCOMMONS_DECODE__THREDS): did you mean 'threads'?",
        ),
        ("KVCOMMONS_DECOD__THREADS", "the variable KVCOMMONS_DECOD__THREADS: did you mean 'decode'?"),
        ("KVCOMMONS_DECODE_THREADS", "did you mean KVCOMMONS_DECODE__THREADS?"),
        ("KVCOMMONS_DECODE__THREADS", "threads = 'many' in the environment (KVCOMMONS_DECODE__THREADS)"),
    ],
)
def test_mistakes_in_the_environment(variable: str, says: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        settings(environ={variable: "many"})
    assert says in caught.value.message


def test_mistakes_in_flags() -> None:
    with pytest.raises(InvalidInput, match="--set threads: expected name=value"):
        flags_of(["threads"])
    assert flags_of(["drain-s=1", "drain_s=2"]) == {"drain_s": "2"}
    with pytest.raises(InvalidInput, match="password is a secret and never comes from a flag"):
        settings(password="x")
    assert settings(environ={"KVCOMMONS_DECODE__PASSWORD": "x"}).password == "x"
    with pytest.raises(InvalidInput, match=r"threads = .1\.5. in the flag --set threads"):
        settings(threads="1.5")
    with pytest.raises(InvalidInput, match="share is larger than threads"):
        settings(share="2")


def test_mistakes_in_a_file_that_was_made_of_another(tmp_path: Path) -> None:
    """`kvcommons up` hands its services one of its own; people look for a mistake in theirs."""
    theirs = tmp_path / "their own.toml"
    text = toml.dumps({"decode": {"threads": 0}, "router": {}}, origin=theirs)
    with pytest.raises(InvalidInput) as caught:
        settings(text, folder=tmp_path)
    made = tmp_path / "kvcommons.toml"
    assert f"threads = 0 in [decode] of {theirs} (read from {made}): " in caught.value.message
    with pytest.raises(InvalidInput, match=r"unknown setting 'thread' in \[decode\] of .*their own.toml"):
        settings(toml.dumps({"decode": {"thread": 2}}, origin=theirs), folder=tmp_path)
    for value in (date(2026, 1, 1), [time(9)], {"a": time(9)}):
        with pytest.raises(InvalidInput, match=r"threads in \[decode\] of .*their own.toml: dates and times"):
            toml.dumps({"decode": {"threads": value}}, origin=theirs)
    braces = toml.dumps({"decode": {"data": "/a{b}"}}, origin=theirs)
    assert settings(braces, folder=tmp_path).data == Path("/a{b}")


def test_a_flag_is_named_as_it_is_written() -> None:
    with pytest.raises(InvalidInput, match=r"threads = '0' in the flag --threads: "):
        load("decode", Config, environ={}, flags={**BASE, "threads": "0"}, flag="--{name}")


def test_what_is_missing_is_named_with_the_ways_to_set_it() -> None:
    with pytest.raises(InvalidInput) as caught:
        load("decode", Config, environ={}, flags={"listen": "a:1"})
    assert "ledger is not set" in caught.value.message
    assert "KVCOMMONS_DECODE__LEDGER" in caught.value.message
    with pytest.raises(InvalidInput, match="cannot be read: No such file"):
        load("decode", Config, file=Path("/nowhere.toml"), environ={}, flags=BASE)


def test_a_socket_path_that_the_kernel_would_refuse_is_refused_here() -> None:
    assert settings(listen="unix:/" + "x" * 106)
    with pytest.raises(InvalidInput, match="at most 107 bytes"):
        settings(listen="unix:/" + "x" * 107)
