"""Clients that people have, unchanged but for the base URL, each in an environment of its own: what
docs/clients.md shows of them, and all that they do with a chat."""

from __future__ import annotations

from pathlib import Path

import pytest

from devstack.fetch import MODELS
from tests.system.clients.environments import ClientEnvironment, NoClients, node_clients, python_clients
from tests.system.conftest import FLOAT32
from tests.system.examples import ADDRESS, sections
from tests.system.real_model import fetched_smollm2
from tests.system.stack import Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SCRIPTS = Path(__file__).parent / "clients"
EXAMPLES = sections("docs/clients.md")
# What an example prints, by its section.
PRINTED = {
    "OpenAI, Python": ["Zuzu"],
    "OpenAI, Node": ["Zuzu"],
    "Anthropic, Python": ["Zuzu"],
    "LangChain": ["Zuzu", "is remembered."],
    "OpenAI agents SDK": ["called for a", "2 answers"],
    "instructor": ["Pet "],
    "Vercel AI SDK": ["Zuzu"],
}
CHAT_AND_RESPONSES = ("chat completions", "responses")
# What a script prints: its checks that went through, each for every kind of model that the client has.
CHECKS = {
    "openai_client.mjs": ["chat", "stream", "session", "tools", "structured", "responses", "error"],
    "anthropic_client.py": ["chat", "stream", "session", "tools", "structured", "error"],
    "langchain_client.py": [
        f"{kind}: {check}"
        for kind in CHAT_AND_RESPONSES
        for check in ("chat", "history", "session", "stream", "tools", "structured", "error")
    ],
    "agents_client.py": [
        f"{kind}: {check}"
        for kind in CHAT_AND_RESPONSES
        for check in ("chat", "session", "stream", "tools", "structured", "error")
    ],
    "instructor_client.py": [
        f"{mode}: {check}"
        for mode in ("tool_call", "tools_strict", "json_schema_mode")
        for check in ("structured", "stream", "session", "error")
    ],
    "ai_sdk_client.mjs": [
        f"{kind}: {check}"
        for kind in ("chat", "responses", "compatible")
        for check in ("chat", "stream", "history", "tools", "structured", "error")
    ],
}


@pytest.fixture(scope="module")
def python() -> ClientEnvironment:
    try:
        return python_clients()
    except NoClients as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def node() -> ClientEnvironment:
    try:
        return node_clients()
    except NoClients as missing:
        pytest.skip(str(missing))


def environment(request: pytest.FixtureRequest, *, javascript: bool) -> ClientEnvironment:
    found: ClientEnvironment = request.getfixturevalue("node" if javascript else "python")
    return found


@pytest.mark.parametrize("script", CHECKS)
def test_all_that_a_client_does(stack: Stack, request: pytest.FixtureRequest, script: str) -> None:
    client = environment(request, javascript=script.endswith(".mjs"))
    printed = client.run((SCRIPTS / script).read_text(), stack.url)
    assert printed.splitlines() == CHECKS[script]


def test_an_agent_calls_where_its_model_wants_to(python: ClientEnvironment, tmp_path: Path) -> None:
    """With SmolLM2, which writes calls once it has seen some: under `auto` nothing holds it."""
    fetched_smollm2()
    with Stack(tmp_path, tables=FLOAT32, model="smollm2") as stack:
        script = (SCRIPTS / "agents_auto_client.py").read_text()
        printed = python.run(script, stack.url, MODELS["smollm2"].name)
    assert printed.splitlines() == [
        f"{kind}: It rains in {city}." for kind in CHAT_AND_RESPONSES for city in ("Oslo", "Madrid")
    ]


@pytest.mark.parametrize("section", PRINTED)
def test_the_examples_of_the_document(stack: Stack, request: pytest.FixtureRequest, section: str) -> None:
    language, example = EXAMPLES[section]
    client = environment(request, javascript=language == "javascript")
    printed = client.run(example.replace(ADDRESS, stack.url))
    for words in PRINTED[section]:
        assert words in printed


def test_every_example_is_run() -> None:
    """The programs of coding agents by test_coding_agents.py."""
    assert EXAMPLES.keys() == PRINTED.keys() | {"Coding agents"}
