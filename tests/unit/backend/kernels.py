"""The compiled kernel's variants, for tests that hold each of them to torch."""

from __future__ import annotations

import pytest

from kvcommons.attention.native import library


def variants() -> list[str]:
    kernel = library.chosen()
    return kernel.variants() if kernel is not None else []


needs_compiler = pytest.mark.skipif(not variants(), reason="no C++ compiler here")
