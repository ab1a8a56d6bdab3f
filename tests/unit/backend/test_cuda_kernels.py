"""The kernels for GPUs compile for GPUs that are not here, and fit them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interpreted import needs_triton
from tests.machine import scaled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(scaled(600)), needs_triton]
# That a program can have on every GPU from compute capability 8.0 on.
SHARED_BYTES = 99 << 10


@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_fits_and_spills_nothing(capability: int, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.backend.compile_kernels", str(capability)],
        env=environment, capture_output=True, text=True, timeout=scaled(500), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout)
    names = {one["kernel"].split()[0] for one in kernels}
    assert names == {
        "_attend_unit", "_merge_row", "_norm_row", "_rotate_head", "_gate_row", "_multiply_outputs",
        "_append_head",
    }  # fmt: skip
    for one in kernels:
        assert one["shared_bytes"] <= SHARED_BYTES, one
        assert not one["spilled_bytes"], one
