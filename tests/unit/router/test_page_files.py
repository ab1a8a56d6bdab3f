"""The web page's files: whole, known, and without a word of other hosts."""

from __future__ import annotations

import hashlib
import re
import tomllib
from pathlib import Path

import pytest

from services.router.page.page import page_files

ROOT = Path(__file__).parents[3]
STATIC = ROOT / "services" / "router" / "page" / "static"
VENDOR = STATIC / "vendor"
# As vendor/README.md says which files they are.
HASHES = {
    "lit-html.js": "22115ca1002e4afc0dd2cb208f28d9c71a577a8989d4185028e26b29676e7842",
    "marked.js": "c622dc6824a1c92c2d10ea9ede2fc872e46128afcc34b298e6ddee6f387ace8e",
    "purify.js": "f1f1ba66e2951e5ca14bc4e71e24cc503d35d49c68f9bcfa4fd97970cb71c76b",
}
# Names of XML vocabularies, which nobody looks up.
NAMESPACES = ("http://www.w3.org/",)


def own_files() -> list[Path]:
    return [path for path in STATIC.rglob("*") if path.is_file() and path.parent != VENDOR]


def test_libraries_are_those_that_were_looked_at() -> None:
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in VENDOR.glob("*.js")}
    assert found == HASHES


@pytest.mark.parametrize("name", HASHES)
def test_a_library_has_its_licence_and_its_version_beside_it(name: str) -> None:
    assert (VENDOR / name).with_suffix(".LICENSE").stat().st_size > 500
    row = next(line for line in (VENDOR / "README.md").read_text().splitlines() if f"`{name}`" in line)
    version = re.search(r"\| (\d+\.\d+\.\d+) \|", row)
    assert version is not None
    if name != "lit-html.js":  # which says it in a form of its own
        assert version[1] in (VENDOR / name).read_text()


def test_no_file_names_another_host() -> None:
    """Nor may it: the content security policy allows no request to one."""
    problems = [
        f"{path.name}: {url}"
        for path in own_files()
        for url in re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"'`)]*", path.read_text())
        if not url.startswith(NAMESPACES)
    ]
    assert problems == []


def test_no_text_becomes_markup_but_through_the_sanitiser() -> None:
    """lit-html sets text as text; what is written here has none of the ways around it."""
    ways = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|unsafeHTML|\beval\(|new Function"
    )
    assert [path.name for path in own_files() if ways.search(path.read_text())] == []


def test_no_style_or_script_stands_in_markup() -> None:
    """The policy would leave it out without a word."""
    ways = re.compile(r"\sstyle=|<style|\son[a-z]+=[\"']|<script(?![^>]*\ssrc=)")
    assert [path.name for path in own_files() if ways.search(path.read_text())] == []


def test_what_modules_import_is_there() -> None:
    for path in [*STATIC.rglob("*.js"), STATIC / "index.html"]:
        base = path.parent if path.suffix == ".js" else STATIC.parent
        pattern = r"from\s*\"(\.[^\"]+)\"" if path.suffix == ".js" else r"(?:src|href)=\"(page/[^\"]+)\""
        for target in re.findall(pattern, path.read_text()):
            found = (STATIC / target.removeprefix("page/")) if path.suffix == ".html" else base / target
            assert found.is_file(), f"{path.name}: {target}"


def test_each_file_is_served_and_packaged() -> None:
    served = page_files()
    assert served["/"].body == (STATIC / "index.html").read_bytes()
    shown = [path for path in STATIC.rglob("*") if path.suffix in (".js", ".css", ".svg")]
    assert {f"/page/{path.relative_to(STATIC).as_posix()}" for path in shown} == served.keys() - {"/"}
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert packaged["services.router.page"] == ["static/**/*"]


def test_the_page_is_light() -> None:
    assert sum(len(file.compressed or file.body) for file in page_files().values()) < 100_000
