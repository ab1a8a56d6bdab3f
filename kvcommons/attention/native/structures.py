"""The structures that the library takes, read from its headers: they are written down there and nowhere else.

The library's file name has a digest of the headers, so that the two belong together; that both lay them out
alike is compared when the library is loaded.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from kvcommons.errors import Internal

_HEADERS = ("attend.h", "exchange.h", "products.h", "slices.h", "advance.h", "forward.h")
_NUMBERS: Mapping[str, Any] = MappingProxyType(
    {
        "int64_t": ctypes.c_int64,
        "int32_t": ctypes.c_int32,
        "uint32_t": ctypes.c_uint32,
        "float": ctypes.c_float,
    }
)
_STRUCTURE = re.compile(r"^struct (kvc_\w+) \{\n(.*?)^\};", re.MULTILINE | re.DOTALL)
_DECLARATION = re.compile(r"(?:const )?(\w+)\s*((?:\*\s*(?:const)?\s*)*)(.+)", re.DOTALL)


def read(headers: str) -> dict[str, type[ctypes.Structure]]:
    """By name; of fields that are numbers, pointers, and structures before them."""
    found: dict[str, type[ctypes.Structure]] = {}
    for name, body in _STRUCTURE.findall(headers):
        fields: list[tuple[str, Any]] = []
        for declaration in re.sub(r"//[^\n]*", "", body).split(";"):
            match = _DECLARATION.fullmatch(declaration.strip())
            if match is None:
                continue
            kind, pointer, names = match.groups()
            c_type = ctypes.c_void_p if pointer else _NUMBERS.get(kind) or found[kind]
            fields += [(one.strip(), c_type) for one in names.split(",")]
        found[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return found


# Attributes of a structure are its fields, which no type checker knows.
STRUCTURES: Mapping[str, Any] = MappingProxyType(
    read("\n".join((Path(__file__).parent / name).read_text() for name in _HEADERS))
)


def fill(structure: Any, **fields: Any) -> None:
    """Sets fields; a tensor's to where it lies, which the caller keeps alive."""
    for name, value in fields.items():
        setattr(structure, name, value.data_ptr() if isinstance(value, Tensor) else value)


class _Size(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("bytes", ctypes.c_int64))


def check(library: ctypes.CDLL) -> None:
    """Raises Internal where the library lays one out in another way."""
    table = ctypes.cast(library.kvc_structures, ctypes.POINTER(_Size))
    sizes, index = {}, 0
    while (entry := table[index]).name:
        sizes[entry.name.decode()] = entry.bytes
        index += 1
    ours = {name: ctypes.sizeof(structure) for name, structure in STRUCTURES.items()}
    if ours != sizes:
        wrong = sorted(name for name in ours.keys() | sizes.keys() if ours.get(name) != sizes.get(name))
        raise Internal(
            f"the attention library was compiled with other structures ({', '.join(wrong)}): build it "
            "again by `python -m kvcommons.attention.native.build`"
        )
