"""compose.yaml on a real engine: built, up, healthy, scaled, restarted in mid-conversation.

Skips where no engine answers. BASE_IMAGE and the other variables of compose.yaml are taken from the
environment.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from devstack.rest import RestClient
from kvcommons.errors import KVCommonsError, Unauthenticated

ROOT = Path(__file__).parents[2]
BLOCK_TOKENS = 16
pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]


class Engine:
    """`docker compose` on a project, on a port and with volumes of its own, which go with the context. Skips
    where no engine answers."""

    def __init__(self, project: str, port: int, **environment: str) -> None:
        if shutil.which("docker") is None:
            pytest.skip("no docker on PATH")
        if subprocess.run(["docker", "info"], capture_output=True, check=False, timeout=60).returncode != 0:
            pytest.skip("no container engine answers (DOCKER_HOST)")
        self._port = port
        self._environment = {
            **os.environ,
            "KVCOMMONS_PORT": str(port),
            "COMPOSE_PROJECT_NAME": project,
            **environment,
        }

    def compose(self, *arguments: str, timeout_s: float = 300) -> str:
        done = subprocess.run(
            ["docker", "compose", *arguments],
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, (
            f"docker compose {arguments}:\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
        )
        return done.stdout

    def up(self, *arguments: str) -> None:
        self.compose("up", "--detach", "--wait", "--wait-timeout", "180", *arguments)

    def containers(self) -> list[dict[str, str]]:
        """Name, service, state and health of each."""
        text = self.compose("ps", "--format", "json")
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def client(self) -> RestClient:
        tenant, key, _ = self.compose("exec", "-T", "router", "cat", "/data/api_keys").split()
        assert tenant == "local"
        return RestClient(f"http://127.0.0.1:{self._port}", api_key=key)

    def __enter__(self) -> Self:
        self.compose("down", "--volumes", "--remove-orphans")
        self.compose("build", timeout_s=1500)
        return self

    def __exit__(self, *_: object) -> None:
        self.compose("down", "--volumes", "--remove-orphans")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("kvcommons-test", 18700) as engine:
        engine.up()
        yield engine


@pytest.fixture(scope="module")
def client(engine: Engine) -> RestClient:
    return engine.client()


def ready(client: RestClient, service: str) -> int:
    instances = client.get("/v1/status")["instances"]
    return sum(1 for instance in instances if instance["service"] == service and instance["ready"])


def until_ready(client: RestClient, service: str, count: int, wait_s: float = 90) -> None:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            found = ready(client, service)
        except KVCommonsError:
            found = -1
        if found == count and client.healthy():
            return
        assert time.monotonic() < deadline, f"{found} of {count} {service} are ready"
        time.sleep(0.2)


def test_all_services_are_healthy_and_confined(engine: Engine) -> None:
    containers = engine.containers()
    services = {container["Service"] for container in containers}
    assert services == {"etcd", "ledger", "kvstore", "prefill", "decode", "attention_pool", "router"}
    assert_confined(containers)


def assert_confined(containers: list[dict[str, str]]) -> None:
    for container in containers:
        assert container["Health"] == "healthy", container
        found = subprocess.run(
            ["docker", "inspect", container["Name"]], capture_output=True, text=True, check=True, timeout=60
        )
        inspected = json.loads(found.stdout)[0]
        assert inspected["HostConfig"]["ReadonlyRootfs"], container["Name"]
        assert inspected["Config"]["User"] == "kvcommons", container["Name"]
        assert inspected["HostConfig"]["CapDrop"] == ["ALL"], container["Name"]
        assert inspected["HostConfig"]["Memory"] > 0, container["Name"]
        assert 0 < inspected["HostConfig"]["PidsLimit"] <= 1024, container["Name"]
        logs = inspected["HostConfig"]["LogConfig"]["Config"]
        assert logs == {"max-size": "10m", "max-file": "3"}, container["Name"]
        networks = {name.rpartition("_")[2] for name in inspected["NetworkSettings"]["Networks"]}
        shared = {"front"} if container["Service"] == "router" else set()
        assert networks == {"services", *shared}, container["Name"]


def test_router_and_stores_have_no_torch(engine: Engine) -> None:
    code = "import importlib.util as u; print(u.find_spec('torch'))"
    for service in ("router", "kvstore", "ledger"):
        assert engine.compose("exec", "-T", service, "python", "-c", code).strip() == "None"


def test_a_key_is_asked_for(client: RestClient) -> None:
    with pytest.raises(Unauthenticated):
        RestClient(client.url).get("/v1/models")


STRANGER = Path(__file__).with_name("stranger.py")


def _as_stranger(network: str, code: str) -> subprocess.CompletedProcess[str]:
    """Runs it in a container that is none of the stack's, on one of its networks."""
    image = ["--entrypoint", "python", "kvcommons-control", "-c", code]
    return subprocess.run(
        ["docker", "run", "--rm", "--network", f"kvcommons-test_{network}", *image],
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip


def test_a_stranger_on_its_network_is_answered_by_nobody(engine: Engine) -> None:
    """Each of ten ports, with nothing to show and with another authority's certificates."""
    done = _as_stranger("services", STRANGER.read_text())
    assert done.returncode == 0, done.stderr
    tried = done.stdout.splitlines()
    assert len(tried) == 20
    assert [line for line in tried if " refused " not in line] == []


def test_whoever_shares_the_front_reaches_the_router_alone(engine: Engine) -> None:
    code = """
import socket, sys
for name in ("router", "ledger", "kvstore", "prefill", "decode", "attention_pool", "etcd"):
    try:
        print(name, socket.gethostbyname(name))
    except OSError:
        pass
socket.create_connection(("router", 8000), timeout=5)
"""
    done = _as_stranger("front", code)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["router"]


def test_a_conversation_goes_on_over_scaling_and_restart(engine: Engine, client: RestClient) -> None:
    first = client.say("My cat is called Zuzu.", "kept", temperature=0, max_tokens=40)
    assert first.text

    engine.up("--no-recreate", "--scale", "decode=2")
    until_ready(client, "decode", 2)
    second = client.say("What is my cat called?", "kept", temperature=0, max_tokens=40)
    assert "Zuzu" in second.text
    assert second.cached_tokens >= BLOCK_TOKENS

    history = client.session("kept")["tokens"]
    until_saved(client, "kept")
    engine.compose("kill")  # SIGKILL, all of them
    engine.up("--scale", "decode=2")
    client = engine.client()
    until_ready(client, "decode", 2)
    third = client.say("What is my cat called?", "kept", temperature=0, max_tokens=40)
    assert "Zuzu" in third.text
    assert third.cached_tokens == (history - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def until_saved(client: RestClient, session_id: str) -> None:
    deadline = time.monotonic() + 5
    while (
        client.get("/v1/status")["store"]["pending_writes"] or client.session(session_id)["tiers"]["absent"]
    ):
        assert time.monotonic() < deadline, "the turn's KV is not on disk"
        time.sleep(0.05)


# Runs in a container, as its user: kill -9 of the service, whose process is not the first one.
KILL = """
import os
for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
    if pid not in (1, os.getpid()) and b"services.prefill" in open(f"/proc/{pid}/cmdline", "rb").read():
        os.kill(pid, 9)
"""


def test_a_killed_service_comes_back(engine: Engine, client: RestClient) -> None:
    def started() -> int:
        instances = client.get("/v1/status")["instances"]
        return max((item["started_at"] for item in instances if item["service"] == "prefill"), default=0)

    before = started()
    time.sleep(1.1)  # the start is told in whole seconds
    engine.compose("exec", "-T", "prefill", "python", "-c", KILL)
    deadline = time.monotonic() + 60
    while started() <= before:
        assert time.monotonic() < deadline, "prefill is not started again"
        time.sleep(0.2)
    until_ready(client, "prefill", 1)
    assert client.say("What is my cat called?", None, temperature=0, max_tokens=8).text
