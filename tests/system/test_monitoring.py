"""A real Prometheus takes what services export, and evaluates each panel and each rule. Skipped where there
is none (`apt-get install prometheus`); that all metrics exist is tested without (test_observability.py)."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvcommons.errors import Unavailable
from tests.contract.rest_stack import free_port
from tests.machine import scaled
from tests.system.monitoring import FOLDER, expressions
from tests.system.observed import SERVICES
from tests.system.scrape import fetch
from tests.system.stack import Stack

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="there is no prometheus on PATH"),
]


@pytest.fixture
def bridge(stack: Stack) -> Iterator[str]:
    """Services of one host export on sockets, which Prometheus does not scrape: at /SERVICE they are here."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = fetch(stack, self.path.lstrip("/")).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, name="bridge")
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(scaled(10))
    server.server_close()


@pytest.fixture
def prometheus(bridge: str, stack: Stack, tmp_path: Path) -> Iterator[str]:
    """With the rules and the jobs of deploy/monitoring; its address."""
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    assert {job["job_name"] for job in config["scrape_configs"]} == set(SERVICES)
    config["global"]["scrape_interval"] = config["global"]["evaluation_interval"] = "1s"
    config["rule_files"] = [str(FOLDER / "rules.yml")]
    config["scrape_configs"] = [
        {"job_name": service, "metrics_path": f"/{service}", "static_configs": [{"targets": [bridge]}]}
        for service in SERVICES
    ]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    command = [
        "prometheus",
        f"--config.file={tmp_path}/prometheus.yml",
        f"--storage.tsdb.path={tmp_path}/tsdb",
    ]
    with (tmp_path / "log").open("w") as log:
        child = subprocess.Popen([*command, f"--web.listen-address={address}"], stderr=log, stdout=log)
    try:
        stack.until(lambda: _answers(address), 30, "prometheus does not start")
        yield address
    finally:
        child.terminate()
        child.wait(scaled(20))


def _ask(address: str, path: str) -> Any:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=scaled(10)) as answer:
        return json.load(answer)


def _answers(address: str) -> bool:
    try:
        return bool(_ask(address, "/api/v1/status/buildinfo"))
    except OSError:
        return False


def _query(address: str, expression: str) -> list[Any]:
    asked = expression.replace("$__rate_interval", "10s").replace("$model", ".*")
    answer = _ask(address, f"/api/v1/query?query={urllib.parse.quote(asked)}")
    assert answer["status"] == "success", (expression, answer)
    found: list[Any] = answer["data"]["result"]
    return found


# Of what did not happen there is nothing to be seen.
QUIET = {"Blocks that move", "Resumed and preempted", "Requests a second"}


def test_panels_show_what_happens_and_no_alert_fires(stack: Stack, prometheus: str) -> None:
    empty: set[str] = set()

    def shown() -> bool:
        stack.client.say("My cat is called Zuzu.", None, max_tokens=8)
        nonlocal empty
        empty = {place for place, expression in expressions() if not _query(prometheus, expression)}
        return {place for place in empty if place.startswith("panel")} <= {f"panel {one!r}" for one in QUIET}

    try:
        stack.until(shown, 60, "panels are empty")
    except Unavailable:
        pytest.fail(f"nothing is shown of {sorted(empty)}")
    rules = _ask(prometheus, "/api/v1/rules")["data"]["groups"][0]["rules"]
    assert [rule["name"] for rule in rules if rule.get("lastError")] == []
    alerts = [alert["labels"]["alertname"] for alert in _ask(prometheus, "/api/v1/alerts")["data"]["alerts"]]
    assert set(alerts) <= {"KVCommonsCoresContended"}  # a machine that does other work, too
