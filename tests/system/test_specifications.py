"""The server keeps to its own /openapi.json, and to OpenAI's specification, whatever it is sent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.system.clients.environments import NoClients
from tests.system.specifications import drive, part_of, schemathesis_command
from tests.system.stack import Stack

MODEL = "kvcommons-demo"
SECONDS = float(os.environ.get("SPECIFICATION_S", "120"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900 + 4 * SECONDS),
]  # the tester's own deadline ends before
# openapi.json of the repository openai/openai-openapi: it is not ours to ship.
OPENAI = os.environ.get("OPENAI_SPECIFICATION")
OPERATIONS = {
    "/chat/completions": ("post",),
    "/completions": ("post",),
    "/models": ("get",),
    "/models/{model}": ("get",),
    "/responses": ("post",),
    "/responses/{response_id}": ("get",),
    "/responses/input_tokens": ("post",),
    "/conversations": ("post",),
    "/conversations/{conversation_id}": ("get", "delete"),
    "/conversations/{conversation_id}/items": ("get",),
    "/conversations/{conversation_id}/items/{item_id}": ("get",),
}


@pytest.fixture(scope="module")
def command() -> str:
    try:
        return schemathesis_command()
    except NoClients as error:
        pytest.skip(str(error))


def test_what_it_says_of_itself_is_true(stack: Stack, command: str, tmp_path: Path) -> None:
    """No error of the server's, no undeclared status, no body that is not as described."""
    status, said = drive(
        command,
        f"{stack.url}/openapi.json",
        stack.url,
        tmp_path,
        model=MODEL,
        checks=(
            "not_a_server_error",
            "status_code_conformance",
            "content_type_conformance",
            "response_schema_conformance",
        ),
        phases="coverage,fuzzing,stateful",
        seconds=SECONDS,
    )
    assert status == 0, said
    stack.assert_no_block_is_held()
    assert stack.client.say("My cat is called Zuzu.", None, temperature=0).text


@pytest.mark.skipif(OPENAI is None, reason="OPENAI_SPECIFICATION names no openapi.json of OpenAI's")
def test_openais_specification(stack: Stack, command: str, tmp_path: Path) -> None:
    """No error of the server's, and each answer of 200 has OpenAI's shape. What is not built is refused, with
    a status that the specification need not have."""
    assert OPENAI is not None
    status, said = drive(
        command,
        part_of(Path(OPENAI), OPERATIONS, tmp_path),
        stack.v1,
        tmp_path,
        model=MODEL,
        # Of streams of completions it says nothing, so content types are no check.
        checks=("not_a_server_error", "response_schema_conformance"),
        phases="coverage,fuzzing",
        seconds=SECONDS,
    )
    assert status == 0, said
    stack.assert_no_block_is_held()
