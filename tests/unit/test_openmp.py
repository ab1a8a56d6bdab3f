"""OpenMP's threads give cores up soon, in every service."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvcommons.openmp import bound_waits


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_what_the_environment_says_stays(name: str) -> None:
    environ = {name: "chosen"}
    bound_waits(environ)
    assert environ == {name: "chosen"}


def test_services_set_it_before_torch_is_loaded() -> None:
    """OpenMP says itself what it has read, when it is loaded."""
    environ = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    process = subprocess.run(
        [sys.executable, "-c", "import services.decode.__main__"],
        env={**environ, "OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "GOMP_SPINCOUNT = '2000'" in process.stderr
