"""The repository as a whole: links that lead somewhere, no traces of one machine, files of a readable
length."""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Files that pass this are asking to be divided.
LINES_MAX = 400
# Written by programs, or lists of data.
UNMEASURED = ("kvcommons/pb/", "demo/model/", "demo/phrases.py", "constraints.txt", "LICENSE")
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$", re.MULTILINE)
DEFINING = (".py", ".cpp", ".h", ".proto", ".toml")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
# Home directories and checkouts of whoever wrote a file; what a container has inside is no such thing.
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|Users|root|work)/\w+")


def tracked() -> list[Path]:
    """All files of the repository, without what git ignores."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout: nothing says which files belong to the repository")
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


def texts(*suffixes: str) -> list[tuple[str, str]]:
    """(name, text) of the tracked text files with one of the suffixes, of all where none is given."""
    found = []
    for path in tracked():
        if suffixes and path.suffix not in suffixes:
            continue
        try:
            found.append((str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            continue
    return found


def anchors(markdown: str) -> set[str]:
    """The fragments that headings of a page answer to, as the common renderers make them."""
    found = set()
    for heading in HEADING.findall(FENCE.sub("", markdown)):
        text = re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", heading).lower())
        found.add(text.replace(" ", "-"))
    return found


def dead_links(name: str, text: str) -> list[str]:
    dead = []
    for target in LINK.findall(FENCE.sub("", text)):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, fragment = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        if not file.resolve().is_relative_to(ROOT) or not file.exists():
            dead.append(f"{name}: {target} is not there")
        elif fragment and file.suffix == ".md" and fragment not in anchors(file.read_text(encoding="utf-8")):
            dead.append(f"{name}: {target} has no such heading")
    return dead


def test_links_in_docs_lead_somewhere() -> None:
    pages = texts(".md")
    assert pages, "no page found"
    assert [problem for name, text in pages for problem in dead_links(name, text)] == []


def test_a_dead_link_is_found() -> None:
    page = "# Here\n[a](no-such-file.md) [b](#here) [c](#nowhere) [d](https://example.org)\n```\n[e](x.md)\n```\n"
    assert [problem.split(": ")[1].split()[0] for problem in dead_links("README.md", page)][:1] == [
        "no-such-file.md"
    ]
    assert anchors(page) == {"here"}


def defines(text: str, name: str) -> bool:
    """Whether a file in one of our languages defines `name`: a class, function, message or call, or a field,
    setting or constant with its type or value."""
    keyword = rf"\b(?:class|def|struct|enum|message|service|rpc) {name}\b"
    # Types before a name are C++'s and the protos'; a default in kvcommons.toml is commented out.
    assigned = rf"^[ \t]*(?:# )?(?:[\w:<>*&]+ )*{name}(?:\[\])?(?: ?=|:)"
    return re.search(f"{keyword}|{assigned}", text, re.MULTILINE) is not None


def test_each_row_of_where_to_change_what_names_what_its_files_define() -> None:
    """Links lead somewhere by the test above; here each name in `code` is defined in the row's files, and
    `Class.method` in one of them."""
    page = ROOT / "docs" / "changing.md"
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| ")][2:]
    assert len(rows) >= 10, "the table is not where it was"
    missing = []
    for row in rows:
        linked = [page.parent / target.partition("#")[0] for target in LINK.findall(row)]
        files = [file for path in linked for file in (path.rglob("*") if path.is_dir() else (path,))]
        found = [file.read_text(encoding="utf-8") for file in files if file.suffix in DEFINING]
        for name in re.findall(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)?)`", row):
            if not any(all(defines(text, part) for part in name.split(".")) for text in found):
                missing.append(f"{row.split(' | ')[0]}: {name}")
    assert missing == []


def test_a_definition_is_told_from_a_use() -> None:
    text = "class Kept:\n    bound_s: float = 1\n    def take(self) -> None:\n        other(used)\nMOST = 3\n"
    assert [name for name in ("Kept", "bound_s", "take", "MOST", "other", "used") if defines(text, name)] == [
        "Kept", "bound_s", "take", "MOST",
    ]  # fmt: skip
    proto = "message Kept {\n  repeated uint32 blocks = 2;\n  // uses taken\n}\n"
    assert [name for name in ("Kept", "blocks", "taken") if defines(proto, name)] == ["Kept", "blocks"]
    assert defines("const Variant* const VARIANTS[] = {", "VARIANTS")


def test_no_path_of_a_developers_machine() -> None:
    own = str(Path(__file__).relative_to(ROOT))
    problems = [
        f"{name}:{number}: {line.strip()}"
        for name, text in texts()
        if name != own
        for number, line in enumerate(text.splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert problems == []


@pytest.mark.filterwarnings("default")
def test_files_are_of_a_readable_length() -> None:
    """A longer one asks whether it is one thing; the summary names it."""
    lengths = {
        name: text.count("\n")
        for name, text in texts(".py", ".md", ".proto", ".toml")
        if not name.startswith(UNMEASURED)
    }
    assert lengths, "no file found"
    for name, lines in lengths.items():
        if lines > LINES_MAX:
            warnings.warn(f"{name} has {lines} lines: is it one thing?", stacklevel=1)


def test_packages_have_no_code_that_runs_on_import() -> None:
    """What imports one module of a package must not pull in the others: torch would follow."""
    packages = [ROOT / name for name in ("kvcommons", "services", "devstack")]
    empty = re.compile(
        r'\A\s*(?:""".*?"""|"[^"\n]*")?\s*(?:from __future__ import annotations\s*)?\Z', re.DOTALL
    )
    problems = [
        str(path.relative_to(ROOT))
        for package in packages
        for path in package.rglob("__init__.py")
        if not empty.match(path.read_text())
    ]
    assert problems == []


def parsed(text: str) -> ast.Module:
    """Without collecting garbage meanwhile: a destructor that fails has its traceback formatted, which parses
    as well, and Python 3.11's parser then mistakes its own depth (SystemError)."""
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        gc.enable()


def test_a_class_name_means_one_thing_in_the_whole_tree() -> None:
    """No public class of `kvcommons` or `services` is called as one of another module."""
    modules: dict[str, list[str]] = {}
    for package in ("kvcommons", "services"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if "_pb2" in path.name:
                continue
            for node in parsed(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    modules.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: places for name, places in modules.items() if len(places) > 1} == {}


BACKEND = "kvcommons/backend/"
KERNELS = "kvcommons.attention."
KERNEL = f"{KERNELS}native"
# The native path of the attention exchange computes nothing of its own: holders may have its functions and
# structures.
EXCHANGE = {f"{KERNEL}.exchange", f"{KERNEL}.structures"}


def asks_for_a_device(name: str, text: str) -> list[str]:
    """Where a module outside of the backends asks what it computes on, or imports what computes."""
    found = []
    for node in ast.walk(parsed(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Attribute):
            asked = ast.unparse(node)
            if node.attr in ("is_cuda", "is_cpu") or asked.endswith("device.type") or asked == "torch.cuda":
                found.append(f"{name}:{node.lineno}: {asked}")
        allowed = EXCHANGE if name.startswith("kvcommons/holder/") else set()
        if any(
            one.startswith(KERNELS) and not any(one.startswith(part) for part in allowed) for one in names
        ):
            found.append(f"{name}:{node.lineno}: imports {names[0]}")
    return found


def test_only_backends_ask_which_device_they_compute_on() -> None:
    """Nor does anybody else reach the kernels: a new device is one more implementation."""
    problems = []
    for package in ("kvcommons", "services", "benchmarks"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if not name.startswith((BACKEND, KERNELS.replace(".", "/"))):
                problems += asks_for_a_device(name, path.read_text(encoding="utf-8"))
    assert problems == []


def test_who_asks_for_a_device_is_found() -> None:
    """In all the ways in which it was done before."""
    asking = (
        "from kvcommons.attention.native import library\n"
        "from kvcommons.attention.native.exchange import Library\n"
        "import kvcommons.attention.native.slices\n"
        "from kvcommons.attention.cuda import attend\n"
        "if memory.device.type == 'cpu' or q.is_cuda or torch.cuda.is_available():\n    pass\n"
    )
    assert len(asks_for_a_device("services/x.py", asking)) == 7
    assert len(asks_for_a_device("kvcommons/holder/x.py", asking)) == 6


# Words that say too little of what they name, each with a word that an engineer of the field looks for.
UNCLEAR = {
    "asking": "pending, outstanding",
    "crossing": "between slices, exchange",
    "filled": "full, computed",
    "following": "the next one, by what it is",
    "room": "capacity, free blocks",
    "rounds": "iterations, sweeps",
    "spent": "used",
    "stay": "duration",
    "surroundings": "callbacks",
    "taken": "accepted, reserved, claimed",
    "told": "reported, announced, logged",
    "witness": "integrity",
}


def bound_names(tree: ast.AST) -> list[tuple[str, int]]:
    """Names that a module gives to classes, functions, arguments, variables and attributes, with lines."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.append((node.name, node.lineno))
        elif isinstance(node, ast.arg):
            found.append((node.arg, node.lineno))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.append((node.id, node.lineno))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.append((node.attr, node.lineno))
    return found


def test_nothing_is_called_by_a_word_that_says_too_little() -> None:
    problems = [
        f"{name}:{line}: {bound}: perhaps {UNCLEAR[word]}"
        for name, text in texts(".py")
        if name.startswith(("kvcommons/", "services/", "devstack/")) and not name.startswith("kvcommons/pb/")
        for bound, line in bound_names(ast.parse(text))
        if (word := bound.strip("_").lower()) in UNCLEAR
    ]
    assert problems == []


def test_the_kernels_structures_are_filled_by_their_fields_names() -> None:
    """Their fields are read from the headers: an argument without a name would go wrong in silence where
    their order changes there, and so would a structure that is written down twice."""
    problems = []
    for path in sorted((ROOT / "kvcommons").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("STRUCTURES[") and node.args:
                problems.append(f"{where}: an argument without a name")
            bases = [ast.unparse(base) for base in node.bases] if isinstance(node, ast.ClassDef) else []
            if "ctypes.Structure" in bases and path.name != "structures.py":
                problems.append(f"{where}: a structure of its own")
    assert problems == []


def test_make_lists_its_targets_as_contributing_does() -> None:
    listed = [
        subprocess.run(
            ["make", *words], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
        ).stdout
        for words in (["help"], [])
    ]
    assert listed[0] == listed[1]
    found = dict(re.findall(r"^  make (\S+) +(\S.*)$", listed[0], re.MULTILINE))
    phony = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found.keys() == set(" ".join(phony).split())
    reported = re.findall(r"^\| `make (\S+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert found.keys() - {"install", "clean"} == set(reported)
