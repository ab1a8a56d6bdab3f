"""What all tests share: bounded threads, so that tests and the stacks they start fit on two cores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before any test imports numpy or torch: they read these once.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Models in tests are made on the spot; nothing asks a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A developer's own settings must not steer the tests.
for _name in [name for name in os.environ if name.startswith("KVCOMMONS_") and "__" in name]:
    del os.environ[_name]

# Real processes and their deadlines: a machine that stalls for seconds may fail such a test once. It gets a
# second try, and the summary names it.
REAL_PROCESSES = tuple(Path(__file__).parent / name for name in ("contract", "fault", "system"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(item.path.is_relative_to(folder) for folder in REAL_PROCESSES):
            item.add_marker(pytest.mark.flaky(reruns=1))
