"""What a JSON body would build, counted on its bytes before anything is built. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvcommons.errors import InvalidInput

# A parser builds an object for each value and each name, at up to 0.5 µs and 150 bytes apiece, and validation
# several for each object of the body. The limits leave room for 5,000 messages, or a prompt of 150,000 token
# ids, and keep all that within some ten milliseconds: the event loop, and every stream with it, waits
# meanwhile.
VALUES_MAX = 150_000
NAMES_MAX = 20_000
CONTAINERS_MAX = 10_000
# Of a body in which strings have to be separated from the rest: each costs some ten nanoseconds there.
ESCAPES_MAX = 1_000_000
_STRINGS_MAX = VALUES_MAX + NAMES_MAX
# A slice of the body and what is made of it stay in the processor's cache.
_SLICE_BYTES = 64 * 1024


def check_counts(body: bytes) -> None:
    """Raises InvalidInput for a body with more values, names, or lists and objects than the limits.

    First commas, colons and brackets are counted as if there were no strings, which is an upper bound. Only
    in a body that passes a limit by it strings are told from the rest. Where the bytes are no JSON the counts
    mean nothing from the first mistake on, and a parser builds nothing from there on either. How deep a body
    is nested the parser bounds itself."""
    if _excess(_slices(body)) is not None and (excess := _excess(_outside_strings(_slices(body)))):
        raise _too_many(*excess)


def _slices(body: bytes) -> Iterator[bytes]:
    for start in range(0, len(body), _SLICE_BYTES):
        yield body[start : start + _SLICE_BYTES]


def _excess(parts: Iterable[bytes]) -> tuple[str, int] | None:
    """What there is more of than its limit, and the limit."""
    values = names = containers = 0
    for part in parts:
        opened = part.count(b"[") + part.count(b"{")
        containers += opened
        names += part.count(b":")
        values += opened + part.count(b",")
        if containers > CONTAINERS_MAX:
            return "lists and objects", CONTAINERS_MAX
        if names > NAMES_MAX:
            return "names", NAMES_MAX
        if values > VALUES_MAX:
            return "values", VALUES_MAX
    return None


def _outside_strings(slices: Iterable[bytes]) -> Iterator[bytes]:
    """What stands between strings. Raises InvalidInput for too many escapes or strings."""
    escapes = quotes = 0
    in_string = False
    held = b""  # a backslash whose second half is in the next slice
    for part in slices:
        if held or b"\\" in part:
            part, held = held + part, b""
            escapes += part.count(b"\\")
            if escapes > ESCAPES_MAX:
                raise _too_many("escapes", ESCAPES_MAX)
            if (len(part) - len(part.rstrip(b"\\"))) % 2:
                part, held = part[:-1], b"\\"
            # Pairs first: a backslash that is left before a quote escapes it.
            part = part.replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = part.split(b'"')
        quotes += len(pieces) - 1
        if quotes > 2 * _STRINGS_MAX:
            raise _too_many("strings", _STRINGS_MAX)
        yield b"".join(pieces[in_string::2])
        in_string ^= len(pieces) % 2 == 0


def _too_many(what: str, limit: int) -> InvalidInput:
    return InvalidInput(f"the body has too many {what}: {limit} are the limit")
