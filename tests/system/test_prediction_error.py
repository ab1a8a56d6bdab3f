"""What iterations take is foreseen under load; `python -m tests.system.prediction_error` loads for a minute,
on a machine that has nothing else to do, and says how well."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.prediction_error import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LOOSE = 0.5  # what others do on this machine meanwhile counts as error


@pytest.mark.parametrize("colocated", [False, True], ids=["apart", "colocated"])
def test_iterations_under_mixed_load_take_about_what_was_expected(tmp_path: Path, colocated: bool) -> None:
    figures = run(tmp_path, 15.0, colocated=colocated)
    assert figures.keys() == ({"decode"} if colocated else {"prefill", "decode"})
    for service, found in figures.items():
        print(f"{service}: {found.mean:.3f}, at last {found.last:.3f}")
        assert 0 < found.mean < LOOSE, service
