"""Agent sessions that were never held, made of a seed: a coding agent reads a file, runs its tests, and is
asked to give the file back with a change. Each ends with a request that the model under test answers.

What is in them is what real ones are made of (a system prompt with tools, files, calls as JSON, results that
are quoted, files that are given back with a line changed); how well they are answered is not the point.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

Messages = list[dict[str, str]]

_NOUNS = ("order", "ticket", "parcel", "invoice", "sensor", "booking", "recipe", "player", "route", "badge")
_FIELDS = ("amount", "owner", "status", "weight", "created", "region", "level", "label", "score", "limit")
_TOOLS = """You are a coding agent. You have these tools, and call one by a line of JSON:
{"tool": "read_file", "path": "..."}
{"tool": "run_tests", "path": "..."}
{"tool": "write_file", "path": "...", "content": "..."}
When you are asked for a file, answer with all of it and nothing else."""


def agent_session(seed: int) -> Messages:
    """Two changes that were made, and a third one that is asked for."""
    draw = random.Random(seed)
    noun, fields = draw.choice(_NOUNS), draw.sample(_FIELDS, 4)
    path, text = f"shop/{noun}s.py", _module(noun, fields)
    messages = [{"role": "system", "content": _TOOLS}]
    messages += [
        {"role": "user", "content": f"Look at {path} and run its tests."},
        {"role": "assistant", "content": json.dumps({"tool": "read_file", "path": path})},
        {"role": "user", "content": f"Result of read_file {path}:\n```python\n{text}```"},
        {"role": "assistant", "content": json.dumps({"tool": "run_tests", "path": f"tests/test_{noun}s.py"})},
        {
            "role": "user",
            "content": f"Result of run_tests tests/test_{noun}s.py:\n{_failure(noun, fields[0])}",
        },
        {"role": "assistant", "content": f"One test fails:\n{_failure(noun, fields[0])}"},
    ]
    changes = draw.sample(_changes(noun, fields), 3)
    for at, (wish, before, after) in enumerate(changes):
        messages.append({"role": "user", "content": f"{wish} Give {path} back, all of it."})
        text = text.replace(before, after)
        if at + 1 < len(changes):
            messages.append({"role": "assistant", "content": f"```python\n{text}```"})
    return messages


def _module(noun: str, fields: Sequence[str]) -> str:
    name = noun.capitalize()
    lines = [f"class {name}:", f"    def __init__(self, {', '.join(fields)}):"]
    lines += [f"        self.{field} = {field}" for field in fields]
    for field in fields:
        lines += ["", f"    def get_{field}(self):", f"        return self.{field}"]
    lines += [
        "",
        f"def total_{fields[0]}({noun}s):",
        "    total = 0",
        f"    for {noun} in {noun}s:",
        f"        total += {noun}.get_{fields[0]}()",
        "    return total",
    ]
    return "\n".join(lines) + "\n"


def _failure(noun: str, field: str) -> str:
    test = f"tests/test_{noun}s.py::test_total_{field}"
    return f"FAILED {test} - AssertionError: assert 41 == 42\n1 failed, 5 passed"


def _changes(noun: str, fields: Sequence[str]) -> list[tuple[str, str, str]]:
    """What is asked for, and the text that it changes into which."""
    return [
        (f"Begin total_{fields[0]} at 1.", "    total = 0\n", "    total = 1\n"),
        (f"Rename the class to Known{noun}.", f"class {noun.capitalize()}:", f"class Known{noun}:"),
        (f"Rename get_{fields[1]} to read_{fields[1]}.", f"def get_{fields[1]}(", f"def read_{fields[1]}("),
        (f"Return {fields[2]} as text.", f"return self.{fields[2]}\n", f"return str(self.{fields[2]})\n"),
        (f"Give {fields[3]} the default None.", f"{fields[3]}):", f"{fields[3]}=None):"),
    ]
