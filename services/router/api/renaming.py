"""Errors of the chat request that a request of another API is served as, told by that API's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from kvcommons.errors import InvalidInput


@contextmanager
def fields_renamed(names: Mapping[str, str]) -> Iterator[None]:
    """`names`: of chat's fields, what the client calls them."""
    try:
        yield
    except InvalidInput as error:
        name = names.get(error.param or "")
        if error.param is not None and name is not None:
            error.message, error.param = error.message.replace(error.param, name), name
        raise
