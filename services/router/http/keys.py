"""The file of API keys: a line for each, "tenant key", and a third word where the key is an operator's.

    alice  3f0c…
    ops    91ab…  operator

It is read again whenever it changes, so that a key is given or taken back without a restart.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvcommons.errors import InvalidInput

log = logging.getLogger(__name__)

OPERATOR = "operator"
LOOK_S = 1.0  # at the file, for a change

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY_CHARS_MIN = 8
_FORM = f"'tenant key', or 'tenant key {OPERATOR}'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What a key gives: the sessions and the KV of a tenant; an operator's key also what is of the whole
    stack, its metrics and its instances."""

    tenant: str
    operator: bool = False


Keys = dict[str, Grant]


def parse_keys(text: str, source: str) -> Keys:
    """Blank lines and lines that begin with # are left out.

    Raises InvalidInput, which names `source` and the line, and never repeats a key.
    """
    keys: Keys = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"{source}, line {number}"
        if len(words) not in (2, 3) or words[2:] not in ([], [OPERATOR]):
            raise InvalidInput(f"{where}: expected {_FORM}", param="api_keys")
        name, key = words[:2]
        if not _NAME.fullmatch(name):
            raise InvalidInput(
                f"{where}: a tenant's name has up to 64 letters, digits, dots, dashes and underscores",
                param="api_keys",
            )
        if len(key) < _KEY_CHARS_MIN:
            raise InvalidInput(f"{where}: a key has at least {_KEY_CHARS_MIN} characters", param="api_keys")
        grant = Grant(tenant=name, operator=len(words) == 3)
        if keys.get(key, grant) != grant:
            raise InvalidInput(
                f"{where}: this key belongs to another tenant, or has another role, already", param="api_keys"
            )
        keys[key] = grant
    if not keys:
        raise InvalidInput(f"{source} has no keys: add lines {_FORM}, or unset api_keys", param="api_keys")
    return keys


def read_keys(path: str | Path) -> Keys:
    """Raises InvalidInput for a file that cannot be read."""
    try:
        return parse_keys(Path(path).read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError:
        raise InvalidInput(f"the API keys in {path} are not UTF-8 text", param="api_keys") from None
    except OSError as error:
        raise InvalidInput(
            f"the API keys in {path} cannot be read: {error.strerror}; name a file with a line {_FORM} for "
            "each key (--api-key-file)",
            param="api_keys",
        ) from error


async def follow_keys(
    path: str, keys: Keys, changed: Callable[[Keys], None], *, look_s: float = LOOK_S
) -> None:
    """Calls `changed` with the keys of the file whenever they are others than `keys` and than the last time,
    until cancelled. What is no file of keys changes nothing, and is logged once."""
    seen: tuple[int, ...] | None = ()
    while True:
        stamp = _stamp(path)
        if stamp != seen:
            seen = stamp
            try:
                found = await asyncio.to_thread(read_keys, path)
            except InvalidInput as error:
                log.error("the keys stay as they were: %s", error.message)
            else:
                if found != keys:
                    keys = found
                    changed(keys)
                    log.info("the keys are others now", extra={"keys": len(keys)})
        await asyncio.sleep(look_s)


def _stamp(path: str) -> tuple[int, ...] | None:
    """Differs where the file does; None where it is gone."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino
