"""Pages of formats: each names its version, and the golden files that pin it; none is left out."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(path for path in (ROOT / "docs" / "formats").glob("*.md") if path.name != "README.md")
GOLDEN = re.compile(r"tests/golden/([\w.-]+)")


def test_each_page_has_a_version_and_is_listed() -> None:
    listed = (ROOT / "docs" / "formats" / "README.md").read_text()
    for page in PAGES:
        text = page.read_text()
        assert re.search(r"\*\*Version \d+", text), f"{page.name} names no version"
        assert "olden" in text, f"{page.name} does not say what pins it"
        assert f"({page.name})" in listed, f"{page.name} is not in the list of formats"


def test_golden_files_and_pages_agree() -> None:
    named = {name for page in PAGES for name in GOLDEN.findall(page.read_text())}
    assert named == {path.name for path in (ROOT / "tests" / "golden").iterdir() if path.is_file()}
