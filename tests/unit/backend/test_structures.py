"""What Python and the library say to each other: the layout of structures, and numbers that both have names
for."""

from __future__ import annotations

import ctypes
import enum
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcommons.attention.native import exchange, structures
from kvcommons.attention.native.exchange import ServingStage, TransferOutcome
from kvcommons.errors import Internal

NATIVE = Path(exchange.__file__).parent


def library(sizes: dict[str, int]) -> Any:
    """That says so of its structures."""
    entries = [*((name.encode(), size) for name, size in sizes.items()), (None, 0)]
    return SimpleNamespace(kvc_structures=(structures._Size * len(entries))(*entries))


def test_a_library_with_other_structures_is_refused_by_name() -> None:
    sizes = {name: ctypes.sizeof(structure) for name, structure in structures.STRUCTURES.items()}
    structures.check(library(sizes))
    grown, *_, lacking = sizes
    for wrong, named in (
        (sizes | {grown: sizes[grown] + 8}, grown),
        ({name: size for name, size in sizes.items() if name != lacking}, lacking),
        (sizes | {"kvc_new": 16}, "kvc_new"),
    ):
        with pytest.raises(Internal, match=rf"other structures \({named}\): build it again"):
            structures.check(library(wrong))


@pytest.mark.parametrize(
    ("file", "name", "ours"),
    [("frames.h", "Outcome", TransferOutcome), ("creditor.cpp", "Stage", ServingStage)],
)
def test_numbers_have_the_same_names_on_both_sides(file: str, name: str, ours: type[enum.IntEnum]) -> None:
    found = re.search(rf"enum {name} : int32_t \{{(.*?)\}}", (NATIVE / file).read_text(), re.DOTALL)
    assert found is not None
    theirs = {key: int(value) for key, value in re.findall(r"(\w+) = (\d+)", found[1])}
    assert theirs == {one.name: one.value for one in ours}
