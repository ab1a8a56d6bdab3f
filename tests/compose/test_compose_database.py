"""compose.database.yaml on a real engine: a stack with one kvstore gets a PostgreSQL and a second one; any of
these is killed."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterator

import pytest

from tests.compose.test_compose import Engine, assert_confined, until_ready

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]


PROJECT, PORT = "kvcommons-test-database", 18701
TELLS = ("My cat is called Zuzu.", "My brother is called Benno.", "What is my cat called?")
PASSWORD = "/run/secrets/records_password"
# As docs/operations.md has it.
MOVE = f"""
run --rm --no-TTY --entrypoint python kvstore -m services.kvstore.records move
--data /data --to postgresql://kvcommons@postgres/postgres --password-file {PASSWORD}
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    password = tmp_path_factory.mktemp("secret") / "records_password"
    password.write_text(secrets.token_hex(16) + "\n")
    password.chmod(0o644)  # it is read by the containers' user
    alone = Engine(PROJECT, PORT)
    with Engine(
        PROJECT,
        PORT,
        COMPOSE_FILE="compose.yaml:compose.database.yaml",
        KVCOMMONS_RECORDS_PASSWORD_FILE=str(password),
    ) as engine:
        alone.up()
        alone.client().say(TELLS[0], "kept", temperature=0, max_tokens=40)
        alone.compose("stop")
        assert "Moved now: 1; there before: 0" in engine.compose(*MOVE.split())
        engine.up()
        yield engine


def test_the_database_is_healthy_and_confined_and_asks_for_its_password(engine: Engine) -> None:
    containers = [one for one in engine.containers() if one["Service"] in ("postgres", "kvstore")]
    assert sorted(one["Service"] for one in containers) == ["kvstore", "kvstore", "postgres"]
    assert_confined(containers)
    code = """
import psycopg
try:
    psycopg.connect("postgresql://kvcommons@postgres/postgres")
except psycopg.OperationalError as error:
    print(error)
"""
    assert "no password supplied" in engine.compose("exec", "-T", "kvstore", "python", "-c", code)


def test_a_conversation_outlives_each_kvstore_and_the_database(engine: Engine) -> None:
    client = engine.client()
    until_ready(client, "kvstore", 2)
    stores = [one["Name"] for one in engine.containers() if one["Service"] == "kvstore"]
    assert len(stores) == 2
    for store, text in zip(stores, TELLS[1:], strict=True):
        subprocess.run(["docker", "kill", store], check=True, capture_output=True, timeout=60)
        answer = client.say(text, "kept", temperature=0, max_tokens=40)
        engine.up()
        until_ready(client, "kvstore", 2)
    assert "Zuzu" in answer.text
    tokens = client.session("kept")["token_ids"]
    engine.compose("kill", "postgres")
    engine.up()
    until_ready(client, "kvstore", 2)
    assert client.session("kept")["token_ids"] == tokens
    assert "Zuzu" in client.say(TELLS[2], "kept", temperature=0, max_tokens=40).text
