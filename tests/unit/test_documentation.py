"""Generated pages say something of everything, and the site is made without a warning."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from kvcommons import errors
from kvcommons.errors import KVCommonsError

ROOT = Path(__file__).parents[2]
# Between services only.
_INTERNAL = {"unknown_plan", "stale_epoch"}


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Example:
    plain: int = 1  # behind it
    # Above it,
    # in two lines.
    above: int = 2
    both: dict[str, int] = (  # type: ignore[assignment]
        None
    )  # the last line has it
    none: int = 3


def test_a_setting_s_reason_is_the_comment_at_its_field(generate: ModuleType) -> None:
    found = generate.field_comments(Example)
    assert found["plain"] == "Behind it"
    assert found["above"] == "Above it, in two lines"
    assert found["both"].endswith("the last line has it")
    assert found["none"] == ""


def test_every_setting_has_a_reason(generate: ModuleType) -> None:
    rows = [line for line in generate.settings_page().splitlines() if line.startswith("| `")]
    assert len(rows) > 150
    assert [row for row in rows if not row.removesuffix("|").rpartition(" | ")[2].strip()] == []


def test_every_path_and_every_object_has_its_place(generate: ModuleType) -> None:
    page = generate.api_page()
    links = set(re.findall(r"\]\(#([a-z0-9_]+)\)", page))
    headings = {line.removeprefix("### ").lower() for line in page.splitlines() if line.startswith("### ")}
    assert links <= headings
    for path in (
        "POST /v1/chat/completions",
        "POST /v1/responses",
        "POST /v1/messages",
        "GET /v1/sessions/{id}",
    ):
        assert f"## {path}\n" in page


def codes() -> dict[str, int]:
    """Of all errors that a client may get, with their status."""
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, KVCommonsError)
    ]
    return {kind.code: kind("").http_status for kind in kinds if kind.code not in _INTERNAL}


def test_troubleshooting_has_every_code_with_its_status() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    rows = {code: int(status) for code, status in re.findall(r"^\| `(\w+)` \| (\d+) \|", page, re.MULTILINE)}
    assert len(rows) > 20
    assert rows == codes()


def test_the_site_is_made_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-q", "--fail-on-warning", "-b", "html", str(ROOT / "docs")]
    environ = {name: value for name, value in os.environ.items() if name != "SOURCE_URL"}
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    start = (tmp_path / "index.html").read_text()
    assert "quickstart.html" in start
    # It begins with what this is, how to try it, and where each reader goes on.
    text = re.sub(r"<[^>]+>", "", start.split("<article", 1)[1])
    first = ("serves long conversations", "make up", "kvcommons chat", "you build an application")
    places = [
        text.index(part) for part in (*first, "you run it for others", "you change it", "Build with it")
    ]
    assert places == sorted(places)
    # Nothing of another host is loaded by whoever reads it.
    assert re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"https?://", start) == []
    assert "<code" in (tmp_path / "architecture.html").read_text()
