"""Jinja2 as chat templates expect it: the environment that `transformers` gives them, sandboxed."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from kvcommons.errors import InvalidInput


def compile_template(source: str, now: Callable[[], datetime]) -> tuple[jinja2.Template, frozenset[str]]:
    """With the names that the template reads, and does not set in all of its branches. Raises InvalidInput
    where `source` is no Jinja template."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    environment.globals["dict"] = _make_dict
    environment.globals["namespace"] = _GuardedNamespace
    try:
        names = meta.find_undeclared_variables(environment.parse(source))
        return environment.from_string(source), frozenset(names)
    except jinja2.TemplateError as error:
        raise InvalidInput(f"the model's chat template cannot be read: {error}", param="model") from error


class _Generation(Extension):
    """`{% generation %}` marks what a model said, for training; the text in it is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _GuardedNamespace(Namespace):
    """Refuses names with an underscore in front, by which templates reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # No named parameter, so that a template may pass `self=`.
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template's namespace cannot have the name {name!r}")


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """`dict(...)`, without the class and what hangs on it."""
    return dict(*args, **kwargs)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes HTML, which no model was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
