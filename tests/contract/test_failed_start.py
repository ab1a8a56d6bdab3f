"""Holders that fail late in their start, when the model is loaded and threads and channels are there: they
end by themselves, with a status and a line that says what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvcommons.transport.addresses import listen

START_S_MAX = 60
MODEL = Path(__file__).parents[2] / "demo" / "model"


@pytest.mark.parametrize("service", ["decode", "attention_pool"])
@pytest.mark.parametrize(
    ("address", "status", "says"),
    [
        ("", 1, "is in use: stop what listens there, or choose another port"),
        ("unix:{folder}/nowhere/data", 2, "cannot listen on unix:{folder}/nowhere/data: No such file"),
    ],
)
def test_a_data_address_that_cannot_be_taken(
    tmp_path: Path, service: str, address: str, status: int, says: str
) -> None:
    taken = listen("tcp:127.0.0.1:0")
    try:
        settings = {
            "model": MODEL,
            "listen": f"unix:{tmp_path}/control",
            "data_listen": address.format(folder=tmp_path) or taken.address,
            "ledger": f"unix:{tmp_path}/no-ledger,unix:{tmp_path}/none-either",
            "capacity_tokens": 1024,
        }
        done = subprocess.run(
            [sys.executable, "-m", f"services.{service}", *(f"--set={k}={v}" for k, v in settings.items())],
            check=False,
            capture_output=True,
            text=True,
            timeout=START_S_MAX,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    finally:
        taken.close()
    assert done.returncode == status, done.stderr
    last = json.loads(done.stderr.splitlines()[-1])
    assert last["level"] == "critical"
    assert says.format(folder=tmp_path) in last["message"]
    assert "Traceback" not in done.stderr
