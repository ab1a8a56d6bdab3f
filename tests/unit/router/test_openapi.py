from __future__ import annotations

from dataclasses import replace

import pytest

from services.router.api.openapi import describe
from services.router.api.routes import routes


def test_an_error_without_a_reason_says_where_the_reason_goes() -> None:
    """The router describes its routes when it starts: so does whoever adds one."""
    odd = replace(routes()[0], path="/v1/odd", errors=(418,))
    with pytest.raises(AssertionError, match=r"/v1/odd: say in _REASONS of openapi\.py .* 418"):
        describe([odd], version="1")
