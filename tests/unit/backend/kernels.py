"""The compiled kernel's variants, for tests that hold each of them to torch."""

from __future__ import annotations

import pytest

from kvcommons.attention.native import library
from kvcommons.attention.native.library import Kernel


def variants() -> list[str]:
    kernel = library.chosen()
    return kernel.variants() if kernel is not None else []


needs_compiler = pytest.mark.skipif(not variants(), reason="no C++ compiler here")


def chosen(variant: str, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """The kernel, where this variant of it is asked for."""
    monkeypatch.setenv(library.VARIABLE, variant)
    kernel = library.chosen()
    assert kernel is not None
    assert kernel.variant == variant
    return kernel
