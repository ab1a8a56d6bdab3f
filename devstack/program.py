"""How this command line is called: its name as a person has to type it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

NAME = "kvcommons"


def program() -> str:
    """`kvcommons` where a shell finds it; else the path that this process was called by (`make up` installs
    into a folder that is on nobody's PATH)."""
    if shutil.which(NAME) is not None:
        return NAME
    called = Path(sys.argv[0])
    if called.name != NAME:
        return f"{sys.executable} -m devstack"
    path = called.absolute()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
