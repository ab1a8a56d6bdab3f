"""A real Prometheus takes what services export, and evaluates each panel and each rule; promtool lets each
alert fire. Skipped where they are not there (`apt-get install prometheus`); that all metrics exist is tested
without (test_observability.py).
"""

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

pytestmark = pytest.mark.slow


def needs(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"there is no {program} on PATH")


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


@needs("prometheus")
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


def _took(name: str, long: str) -> tuple[dict[str, str], dict[str, str]]:
    """60 a minute of a histogram: all of them long, and none of them."""
    fast, slow = "0+60x60", "0x60"
    by_le = {f'{name}_bucket{{job="router",le="{le}"}}': fast for le in (long, "+Inf")}
    within = f'{name}_bucket{{job="router",le="1"}}'
    return by_le | {within: slow}, by_le | {within: fast}


MISSED, MET = (
    f'kvcommons_service_class_requests_total{{service_class="quick",outcome="{outcome}"}}'
    for outcome in ("missed", "met")
)
# What is measured each minute of an hour where an alert fires, and where it does not.
ALERTS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "KVCommonsServiceDown": (
        {'up{job="decode"}': "0x60"}, {'up{job="decode"}': "1x60", 'up{job="another"}': "0x60"},
    ),
    "KVCommonsEtcdAway": (
        {"kvcommons_ledger_etcd_connected": "0x60"}, {"kvcommons_ledger_etcd_connected": "1x60"},
    ),
    "KVCommonsServerErrors": (
        {'kvcommons_request_errors_total{code="data_loss"}': "0+60x60"},
        {'kvcommons_request_errors_total{code="invalid_value"}': "0+60x60"},
    ),
    "KVCommonsBlocksCorrupt": (
        {"kvcommons_block_read_errors_total": "0+1x60"}, {"kvcommons_block_corrupt_total": "7x60"},
    ),
    "KVCommonsWritesFail": (
        {"kvcommons_block_write_failures_total": "0+1x60"}, {"kvcommons_block_write_failures_total": "7x60"},
    ),
    "KVCommonsRecordsDamaged": ({"kvcommons_records_damaged": "1x60"}, {"kvcommons_records_damaged": "0x60"}),
    "KVCommonsSlowCommits": _took("kvcommons_turn_commit_seconds", "5"),
    "KVCommonsNoRoom": ({"kvcommons_room_waiting": "1x60"}, {"kvcommons_room_waiting": "0x60"}),
    "KVCommonsQueueLong": _took("kvcommons_request_queue_time_seconds", "60"),
    "KVCommonsObjectivesMissed": (
        {MISSED: "0+6x60", MET: "0+60x60"}, {MISSED: "0+1x60", MET: "0+60x60"},
    ),
    "KVCommonsCoresContended": (
        {"kvcommons_iteration_prediction_error_ratio": "0.5x60"},
        {"kvcommons_iteration_prediction_error_ratio": "0.1x60"},
    ),
}  # fmt: skip


def _alert_test(name: str, series: dict[str, str], fires: int) -> dict[str, Any]:
    firing = f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) or vector(0)'
    asked = {"expr": firing, "eval_time": "50m", "exp_samples": [{"labels": "{}", "value": fires}]}
    given = [{"series": one, "values": values} for one, values in series.items()]
    return {"interval": "1m", "input_series": given, "promql_expr_test": [asked]}


@needs("promtool")
def test_each_alert_fires_where_it_should_and_is_silent_where_not(tmp_path: Path) -> None:
    rules = yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"][0]["rules"]
    assert [rule["alert"] for rule in rules if "alert" in rule] == list(ALERTS)
    tests = [
        _alert_test(name, series, fires)
        for name, (loud, quiet) in ALERTS.items()
        for series, fires in ((loud, 1), (quiet, 0))
    ]
    written = {"rule_files": [str(FOLDER / "rules.yml")], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(written))
    done = subprocess.run(
        ["promtool", "test", "rules", tmp_path / "tests.yml"],
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
