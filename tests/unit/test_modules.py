"""Which module may know of which, beyond what the import linter holds."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Policies that are plugged into the engine.
PLUGGED = re.compile(r"mini_?batch|stagger|pipelining|replica|(?<!un)rotation", re.IGNORECASE)


def modules(package: str) -> dict[str, ast.Module]:
    """By dotted name."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imported(tree: ast.Module) -> set[str]:
    """Modules, or names in them, anywhere in a module."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_services_have_nothing_that_no_service_runs() -> None:
    """Simulators and planners lie with the benchmarks."""
    trees = modules("services")
    reached = {name for name in trees if name.endswith("__main__")}
    # Alembic loads a database's migrations by their folder.
    reached |= {name for name in trees if ".migrations" in name}
    waiting = list(reached)
    while waiting:
        name = waiting.pop()
        packages = {name.rsplit(".", at)[0] for at in range(1, name.count(".") + 1)}
        new = (imported(trees[name]) | packages) & trees.keys() - reached
        reached |= new
        waiting += new
    assert sorted(trees.keys() - reached) == []


def test_the_engine_names_no_policy_that_is_plugged_into_it() -> None:
    """Rotation, staggering and mini-batches: Lamina's, which pay on few machines."""
    named = [
        f"{module}: {node.id}"
        for module, tree in modules("kvcommons/engine").items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and PLUGGED.search(node.id)
    ]
    named += [
        f"{module}: {name}"
        for module, tree in modules("kvcommons/engine").items()
        for name in sorted(imported(tree))
        if PLUGGED.search(name)
    ]
    assert named == []
