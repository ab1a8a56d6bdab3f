"""Settings: one TOML file with a table per service, the environment over the file, flags over both.

    kvcommons.toml              [decode]
                                threads = 2
    environment                 KVCOMMONS_DECODE__THREADS=2
    flag                        --set threads=2

A file that was made of another one names that one as its `origin`, before its tables: whoever made a mistake
there looks for it there.

A service's settings are a frozen dataclass whose fields carry their constraints (`Annotated[int, Gt(0)]` and
the like; pydantic validates them). A field whose type is itself a dataclass is a *group*: its fields stand in
the service's table beside the others, so that settings are composed in code and flat for people. Names nobody
knows are errors that name the nearest known one; a wrong value is an error that names the field, the value
and its source.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Gt, MinLen
from pydantic import AfterValidator, TypeAdapter, ValidationError

from kvcommons.errors import InvalidInput

# Tables of the settings file. `up` is the stack on one machine.
TABLES = ("router", "prefill", "decode", "attention_pool", "kvstore", "ledger", "up")
PREFIX = "KVCOMMONS_"
ORIGIN = "origin"
# sun_path holds 108 bytes, the last of them a zero.
UNIX_PATH_BYTES_MAX = 107

T = TypeVar("T")


class Secret:
    """Marks a field that never comes from a flag, where any user of the machine could read it, and is never
    shown: `Annotated[str, Secret()]`."""


def _check_address(value: str) -> str:
    if value.startswith("unix:"):
        path = value.removeprefix("unix:")
        if not path.startswith("/"):
            raise ValueError("a unix address needs an absolute path: unix:/run/kvcommons/name")
        if len(os.fsencode(path)) > UNIX_PATH_BYTES_MAX:
            raise ValueError(
                f"a socket path holds at most {UNIX_PATH_BYTES_MAX} bytes: use a shorter directory"
            )
        return value
    host, colon, port = value.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ValueError('expected "unix:/path" or "host:port"')
    return value


# gRPC and metrics: "unix:/path" or "host:port" (port 0 binds a free one).
Address = Annotated[str, AfterValidator(_check_address)]
# Of all replicas of the ledger; any one of them is enough.
Addresses = Annotated[tuple[Address, ...], MinLen(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What every service process has: a control address, a name, a place, and where its telemetry goes."""

    listen: Address  # gRPC
    advertise_control: Address | None = None  # where others reach `listen`; default: what was bound
    instance_id: str | None = None  # default: service-host-random
    host: str | None = None  # decides what is near; default: the machine's name
    metrics_listen: Address | None = None  # Prometheus; off by default
    otlp_endpoint: str | None = None  # traces by OTLP over gRPC, "http://host:4317"; off by default
    log_level: typing.Literal["debug", "info", "warning", "error"] = "info"  # lines below it are not written
    event_log: str | None = None  # a folder: what happens to blocks, a line each; off by default
    drain_s: Annotated[float, Gt(0)] = 10.0  # from SIGTERM to the end, at most
    call_deadline_s: Annotated[float, Ge(0.1)] = 60.0  # of a call that came without one
    # How services know each other beyond Unix sockets, the same way in all of them (docs/security.md): a
    # folder with ca.crt, tls.crt and tls.key; by default not at all.
    certificates: str | None = None
    token_file: str | None = None  # or by this: a file with a secret that all have
    # Nobody but this stack's services is on the network: what has no TLS (UCX) may use it.
    private_network: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlane:
    """Of services that move tensors: their transport address ("shm:/path", "unix:/path", "tcp:host:port" or
    "ucx:host:port"; docs/transports.md)."""

    data_listen: str  # tensors: "shm:/path", "unix:/path", "tcp:host:port" or "ucx:host:port"
    # Of shared memory, for each direction of a connection where data_listen says shm:; 0: none
    data_ring_bytes: Annotated[int, Ge(0)] = 4 << 20
    advertise_data: str | None = None  # default: what was bound


@dataclass(frozen=True, slots=True)
class _Field:
    """One setting: its name, its type with constraints, and the group that it belongs to (None: the
    schema)."""

    name: str
    annotation: Any
    group: str | None
    secret: bool


def load(
    service: str,
    schema: type[T],
    *,
    file: Path | None = None,
    environ: Mapping[str, str],
    flags: Mapping[str, str],
    flag: str = "--set {name}",
) -> T:
    """The settings of `service`, validated.

    `flags` are the values of `--set name=value`, as text; `flag` says how such a flag is written. Raises
    InvalidInput for a name nobody knows, a value of the wrong type or out of bounds, a required setting that
    is nowhere, a secret in a flag, and a file that cannot be read.
    """
    assert service in TABLES, service
    fields = _fields(schema)
    values: dict[str, Any] = {}
    table, written = _table(service, file)
    for name, value in table.items():
        field = _known(fields, name, f"[{service}] of {written}")
        values[name] = _from_file(field, value, f"[{service}] of {written}")
    for variable, name, text in _variables(service, environ):
        field = _known(fields, name, f"the environment ({variable})")
        values[name] = _from_text(field, text, f"the environment ({variable})")
    for name, text in flags.items():
        field = _known(fields, name, "the flags (--set)")
        if field.secret:
            raise InvalidInput(
                f"{name} is a secret and never comes from a flag: put it in the settings file or in"
                f" {PREFIX}{service.upper()}__{name.upper()}",
                param=name,
            )
        values[name] = _from_text(field, text, f"the flag {flag.format(name=name.replace('_', '-'))}")
    return _build(service, schema, fields, values)


def flags_of(settings: Iterable[str]) -> dict[str, str]:
    """`name=value` texts of `--set` as a mapping; a later one beats an earlier one."""
    flags: dict[str, str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name:
            raise InvalidInput(f"--set {setting}: expected name=value")
        flags[name.strip().replace("-", "_")] = value
    return flags


def _fields(schema: type) -> dict[str, _Field]:
    found: dict[str, _Field] = {}
    hints = typing.get_type_hints(schema, include_extras=True)
    for member in dataclasses.fields(schema):
        hint = hints[member.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            for inner in _fields(hint).values():
                assert inner.group is None, (
                    f"groups do not nest: {schema.__name__}.{member.name}.{inner.name}"
                )
                assert inner.name not in found, f"{schema.__name__}: two settings called {inner.name}"
                found[inner.name] = dataclasses.replace(inner, group=member.name)
            continue
        assert member.name not in found, f"{schema.__name__}: two settings called {member.name}"
        secret = any(isinstance(mark, Secret) for mark in getattr(hint, "__metadata__", ()))
        found[member.name] = _Field(member.name, hint, None, secret)
    return found


def _table(service: str, file: Path | None) -> tuple[dict[str, Any], str]:
    """The service's table, and where it was written."""
    if file is None:
        return {}, ""
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(f"the settings file {file} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"the settings file {file} is not TOML: {error}") from error
    origin = document.pop(ORIGIN, None)
    for name, table in document.items():
        if name not in TABLES:
            raise InvalidInput(f"{file}: unknown table [{name}]{_nearest(name, TABLES)}", param=name)
        if not isinstance(table, dict):
            raise InvalidInput(
                f"{file}: {name} is a table: write [{name}] and its settings below", param=name
            )
    written = f"{origin} (read from {file})" if origin is not None else str(file)
    return typing.cast(dict[str, Any], document.get(service, {})), written


def _variables(service: str, environ: Mapping[str, str]) -> Iterable[tuple[str, str, str]]:
    """(variable, setting, text) of each variable of this service; a variable of no service is an error."""
    for variable in sorted(environ):
        if not variable.startswith(PREFIX):
            continue
        table, separator, name = variable.removeprefix(PREFIX).lower().partition("__")
        if not separator:
            meant = next((t for t in TABLES if table.startswith(f"{t}_")), None)
            if meant is not None:
                hint = f"{PREFIX}{meant.upper()}__{table.removeprefix(f'{meant}_').upper()}"
                raise InvalidInput(f"unknown variable {variable}: did you mean {hint}?", param=variable)
            continue
        if table not in TABLES:
            raise InvalidInput(
                f"unknown service in the variable {variable}{_nearest(table, TABLES)}", param=variable
            )
        if table == service:
            yield variable, name, environ[variable]


def _known(fields: Mapping[str, _Field], name: str, source: str) -> _Field:
    if name not in fields:
        raise InvalidInput(f"unknown setting {name!r} in {source}{_nearest(name, fields)}", param=name)
    return fields[name]


def _nearest(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f": did you mean {near[0]!r}?" if near else f": known are {', '.join(names)}"


def _from_file(field: _Field, value: Any, source: str) -> Any:
    # As JSON and strict: a string is a path and a list a tuple, but "8" is no number and 1 no truth value.
    try:
        text = json.dumps(value)
    except (TypeError, ValueError) as error:
        raise _invalid(field, value, source, "dates and times are not used") from error
    try:
        return TypeAdapter(field.annotation).validate_json(text, strict=True)
    except ValidationError as error:
        raise _invalid(field, value, source, _reasons(field, error)) from error


def _from_text(field: _Field, text: str, source: str) -> Any:
    value: Any = text
    kinds = _kinds(field.annotation)
    if kinds & {list, tuple, set, frozenset, dict}:
        if text.lstrip().startswith(("[", "{")):
            try:
                value = json.loads(text)
            except ValueError as error:
                raise _invalid(field, text, source, f"not JSON: {error}") from error
        elif dict not in kinds:
            value = [item.strip() for item in text.split(",") if item.strip()]
    elif not text and types.NoneType in kinds:
        value = None
    try:
        return TypeAdapter(field.annotation).validate_python(value)
    except ValidationError as error:
        raise _invalid(field, text, source, _reasons(field, error)) from error


def _kinds(annotation: Any) -> set[Any]:
    """The plain types that an annotation is made of: `Annotated[tuple[int, ...], …] | None` gives {tuple,
    NoneType}."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return _kinds(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return set().union(*(_kinds(part) for part in typing.get_args(annotation)))
    return {origin or annotation}


def _reasons(field: _Field, error: ValidationError) -> str:
    """With the place in the value. Only of a table are names in it the user's, and not pydantic's."""
    texts, named = [], dict in _kinds(field.annotation)
    for item in error.errors(include_url=False, include_input=False, include_context=False):
        place = ".".join(str(part) for part in item["loc"] if isinstance(part, int) or named)
        reason = item["msg"].removeprefix("Value error, ")
        texts.append(f"{'' if named else 'item '}{place}: {reason}" if place else reason)
    return "; ".join(dict.fromkeys(texts))


def _invalid(field: _Field, value: Any, source: str, reason: str) -> InvalidInput:
    shown = "(secret)" if field.secret else repr(value)
    return InvalidInput(f"{field.name} = {shown} in {source}: {reason}", param=field.name)


def _build(service: str, schema: type[T], fields: Mapping[str, _Field], values: Mapping[str, Any]) -> T:
    missing = [name for name in _required(schema) if name not in values]
    if missing:
        name = missing[0]
        raise InvalidInput(
            f"{name} is not set: put it in [{service}] of the settings file, in"
            f" {PREFIX}{service.upper()}__{name.upper()}, or in --set {name}=…",
            param=name,
        )
    hints = typing.get_type_hints(schema)
    arguments = {name: value for name, value in values.items() if fields[name].group is None}
    try:
        for group in {field.group for field in fields.values()} - {None}:
            members = {name: value for name, value in values.items() if fields[name].group == group}
            arguments[typing.cast(str, group)] = hints[typing.cast(str, group)](**members)
        return schema(**arguments)
    except ValueError as error:  # a check over several settings, in a schema's __post_init__
        raise InvalidInput(f"settings of {service}: {error}") from error


def _required(schema: type) -> list[str]:
    hints = typing.get_type_hints(schema)
    names: list[str] = []
    for member in dataclasses.fields(schema):
        hint = hints[member.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            names += _required(hint)
        elif member.default is dataclasses.MISSING and member.default_factory is dataclasses.MISSING:
            names.append(member.name)
    return names
