"""Generates the pages in docs/reference from what validates settings and requests.

`make docs` runs it; with `--check` it compares instead of writing, which `make check` does. A setting's
reason is the comment at its field; a request's field has its description in its schema.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import sys
import tokenize
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from annotated_types import Ge, Gt, Le, Lt, MinLen

from devstack.settings import UpSettings
from kvcommons.config import PREFIX, Secret
from services.attention_pool.config import AttentionPoolConfig
from services.decode.config import DecodeConfig
from services.kvstore.config import KVStoreConfig
from services.ledger.config import LedgerConfig
from services.prefill.config import PrefillConfig
from services.router.api.openapi import describe
from services.router.api.routes import routes
from services.router.config import RouterConfig

TARGET = Path(__file__).parent / "reference"
SCHEMAS = {
    "up": UpSettings,
    "router": RouterConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "attention_pool": AttentionPoolConfig,
    "kvstore": KVStoreConfig,
    "ledger": LedgerConfig,
}
_SETTINGS = f"""\
<!-- Made by `make docs`. -->

# Settings

All settings stand in one TOML file, `kvcommons.toml`, with a table for each service; `[up]` is the stack on
one machine. The environment beats the file, a flag beats both:

```
[decode]
capacity_tokens = 65536                                   # kvcommons.toml
{PREFIX}DECODE__CAPACITY_TOKENS=65536                  # the environment
python -m services.decode --set capacity_tokens=65536     # a flag
```

A name that nobody knows is an error that names the nearest known one. What has no default has to be set;
`kvcommons up` and compose.yaml set it for each instance.
"""
_API = """\
<!-- Made by `make docs`. -->

# API reference

All paths of the server, made of what validates requests. The same for programs: `GET /openapi.json`. What the
APIs keep, and examples: [APIs](../apis.md). What each error means: [troubleshooting](../troubleshooting.md).
"""
_UNITS = {1 << 30: "GiB", 1 << 20: "MiB"}
_BOUNDS = {Ge: ("ge", "≥"), Gt: ("gt", ">"), Le: ("le", "≤"), Lt: ("lt", "<")}
_SCALARS = {bool: "true or false", int: "integer", float: "number", str: "text", Path: "path"}
_JSON_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
_METHODS = ("get", "post", "delete")


def settings_page() -> str:
    groups: dict[type, list[str]] = {}
    for service, schema in SCHEMAS.items():
        for group in _groups(schema):
            groups.setdefault(group, []).append(service)
    shared = {group for group, services in groups.items() if len(services) > 1}
    parts = [
        _SETTINGS,
    ]
    for service, schema in SCHEMAS.items():
        used = [group for group in _groups(schema) if group in shared]
        parts.append(f"## `[{service}]`\n")
        if used:
            links = ", ".join(f"[{_title(group).lower()}](#{_anchor(group)})" for group in used)
            parts.append(f"With {links}.\n")
        own = [schema, *(group for group in _groups(schema) if group not in shared)]
        parts.append(_settings_table(own))
    for group, services in groups.items():
        if group in shared:
            tables = ", ".join(f"`[{service}]`" for service in services)
            parts += [f"## {_title(group)}\n", f"In {tables}.\n", _settings_table([group])]
    return "\n".join(parts)


def _groups(schema: type) -> list[type]:
    hints = typing.get_type_hints(schema)
    return [hint for hint in hints.values() if dataclasses.is_dataclass(hint) and isinstance(hint, type)]


def _title(group: type) -> str:
    name = group.__name__.removesuffix("Settings")
    words = {
        "Node": "Every service",
        "DataPlane": "Data plane",
        "Engine": "Engine",
        "Stage": "Stages and ranks",
    }
    return words.get(name, name)


def _anchor(group: type) -> str:
    return _title(group).lower().replace(" ", "-")


def _settings_table(schemas: list[type]) -> str:
    lines = ["| setting | value | default | |", "| --- | --- | --- | --- |"]
    for schema in schemas:
        hints = typing.get_type_hints(schema, include_extras=True)
        comments = field_comments(schema)
        for field in dataclasses.fields(schema):
            if _is_group(hints[field.name]):
                continue
            cells = (_kind(hints[field.name]), _default(field), comments.get(field.name, ""))
            lines.append(f"| `{field.name}` | {' | '.join(map(_cell, cells))} |")
    return "\n".join(lines) + "\n"


def _is_group(annotation: Any) -> bool:
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


def field_comments(schema: type) -> dict[str, str]:
    """What the comments say at each field of a dataclass: the lines above it, and the one behind it."""
    source = inspect.getsource(schema)
    comments: dict[int, str] = {}
    alone: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.string.removeprefix("#").strip()
            if not token.line[: token.start[1]].strip():
                alone.add(token.start[0])
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    for node in definition.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        first, end = node.lineno, node.end_lineno or node.lineno
        while first - 1 in alone:
            first -= 1
        lines = [comments[line] for line in range(first, end + 1) if line in comments]
        found[node.target.id] = _sentence(" ".join(lines))
    return found


def _sentence(text: str) -> str:
    word = text.partition(" ")[0]
    begun = text[:1].upper() + text[1:] if word == word.lower() else text  # gRPC is no word to write large
    return begun.rstrip(".;")


def _kind(annotation: Any, bounds: tuple[Any, ...] = ()) -> str:
    """What a setting may be, in words."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _kind(arguments[0], (*bounds, *arguments[1:]))
    if origin in (typing.Union, types.UnionType):
        return _kind(next(one for one in arguments if one is not types.NoneType), bounds)
    if origin is typing.Literal:
        return ", ".join(f"`{_toml(one)}`" for one in arguments)
    if origin is tuple:
        return f"list of {_kind(arguments[0])}"
    if origin is dict:
        return f"table of {_kind(arguments[1])}"
    if dataclasses.is_dataclass(annotation):
        return "tables"
    name = _SCALARS[annotation]
    limits = [
        f"{sign} {getattr(bound, key)}"
        for bound in bounds
        for of, (key, sign) in _BOUNDS.items()
        if type(bound) is of
    ]
    limits += ["not empty" for bound in bounds if isinstance(bound, MinLen)]
    secret = ["never a flag" for bound in bounds if isinstance(bound, Secret)]
    return ", ".join([name, *limits, *secret])


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return "" if field.default is None else f"`{_toml(field.default)}`{_in_units(field.default)}"
    if field.default_factory is not dataclasses.MISSING:
        return f"`{_toml(field.default_factory())}`"
    return "has to be set"


def _in_units(value: Any) -> str:
    if isinstance(value, int):
        for size, unit in _UNITS.items():
            if value >= size and value % size == 0:
                return f" ({value // size} {unit})"
    return ""


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | Path):
        return f'"{value}"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return str(value)


def api_page() -> str:
    document = describe(routes(), version="", keys=True)
    schemas: dict[str, Any] = document["components"]["schemas"]
    parts = [
        _API,
    ]
    for path, operations in document["paths"].items():
        for method in _METHODS:
            if method in operations:
                parts += [*_operation(method, path, operations[method])]
    parts.append("## Objects\n")
    for name in sorted(schemas):
        parts += [*_object(name, schemas[name])]
    return "\n".join(parts)


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f"## {method.upper()} {path}\n"
    yield f"{operation['summary']}\n"
    parameters = [one for one in operation.get("parameters", []) if one["in"] != "path"]
    if parameters:
        yield "| parameter | | value |\n| --- | --- | --- |"
        for one in parameters:
            yield f"| `{one['name']}` | {one['in']} | {_cell(_shape(one['schema'], pattern=False))} |"
        yield ""
    if "requestBody" in operation:
        yield f"Body: {_shape(operation['requestBody']['content']['application/json']['schema'])}\n"
    yield "| status | answer |\n| --- | --- |"
    for status, response in sorted(operation["responses"].items()):
        content = response["content"]
        forms = [_form(kind, described["schema"]) for kind, described in content.items()]
        said = "" if int(status) < 300 else f"{response['description']} "
        yield f"| {status} | {_cell(said + ', or '.join(forms))} |"
    yield ""


def _form(kind: str, schema: Mapping[str, Any]) -> str:
    if kind == "text/event-stream":
        data = schema["properties"]["data"]
        described = data.get("anyOf", [data])[-1]["contentSchema"]["anyOf"][0]
        return f"a stream of {_shape(described)}" + (", and `[DONE]`" if "anyOf" in data else "")
    return "text" if kind == "text/plain" else _shape(schema)


def _object(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    yield f"### {name}\n"
    if schema.get("description"):
        yield f"{' '.join(schema['description'].split())}\n"
    properties = schema.get("properties")
    if not properties:
        yield f"{_shape(schema)}\n"
        return
    required = schema.get("required", ())
    yield "| field | value | |\n| --- | --- | --- |"
    for field, described in properties.items():
        star = "" if field in required else ", optional"
        if field in required and {"type": "null"} in described.get("anyOf", ()):
            star = ", or null"
        text = " ".join(str(described.get("description", "")).split())
        yield f"| `{field}` | {_cell(_shape(described))}{star} | {_cell(text)} |"
    yield ""


def _shape(schema: Mapping[str, Any], *, pattern: bool = True) -> str:
    """A JSON Schema in words; objects by a link to their table."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            forms = [_shape(one, pattern=pattern) for one in schema[key] if one.get("type") != "null"]
            return " or ".join(dict.fromkeys(forms))
    if "const" in schema:
        return f"`{_json(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{_json(one)}`" for one in schema["enum"])
    kind = schema.get("type", "anything")
    if kind == "array":
        items = schema.get("items") or next(iter(schema.get("prefixItems", [])), {})
        return f"list of {_shape(items, pattern=pattern)}{_count(schema, 'Items')}"
    if kind == "object":
        values = schema.get("additionalProperties")
        return f"object of {_shape(values)}" if isinstance(values, dict) and values else "object"
    limits = [f"{sign} {schema[key]}" for key, sign in _JSON_BOUNDS.items() if key in schema]
    return ", ".join([str(kind), *limits]) + _count(schema, "Length")


def _count(schema: Mapping[str, Any], of: str) -> str:
    least, most = schema.get(f"min{of}"), schema.get(f"max{of}")
    unit = " characters" if of == "Length" else ""
    bounds = [f"at least {least}" if least else "", f"at most {most}" if most is not None else ""]
    said = ", ".join(filter(None, bounds))
    return f" ({said}{unit})" if said else ""


def _json(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def main() -> int:
    pages = {"settings.md": settings_page(), "api.md": api_page()}
    if "--check" in sys.argv:
        stale = [
            name
            for name, text in pages.items()
            if not (TARGET / name).exists() or (TARGET / name).read_text(encoding="utf-8") != text
        ]
        if stale:
            print(f"docs/reference is stale ({', '.join(stale)}): run `make docs`", file=sys.stderr)
        return int(bool(stale))
    TARGET.mkdir(exist_ok=True)
    for name, text in pages.items():
        (TARGET / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
