"""`kvcommons bench records` on a real PostgreSQL: what is compared, and that nothing of it is left there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from tests.contract.postgres_server import PostgresServer
from tests.machine import scaled


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_turns_in_a_folder_and_in_a_database(tmp_path: Path, postgres: PostgresServer) -> None:
    url, path = postgres.new_url(), tmp_path / "report.json"
    sizes = {"pairs": 5, "histories": "200,2000", "sessions": 4, "turns": 2, "listing": 250}
    command = [sys.executable, "-m", "devstack", "bench", "records", "--records", url, "--json", str(path)]
    command += [f"--{name}={value}" for name, value in sizes.items()]
    command += ["--picture", str(tmp_path / "records.png")]
    subprocess.run(command, check=True, capture_output=True, timeout=scaled(120))
    report = json.loads(path.read_text())
    assert {row["records"] for row in report["rows"]} == {"folder", "database"}
    assert len(report["rows"]) == 2 * (2 * 2 + 2 + 1)
    assert all(ratio > 0 for ratio in report["ratios"].values())
    assert (tmp_path / "records.png").stat().st_size > 1000
    with psycopg.connect(url) as connection:
        for table in (b"sessions", b"turns", b"block_uses"):
            assert connection.execute(b"SELECT count(*) FROM " + table).fetchone() == (0,)
