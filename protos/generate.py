"""Generates the stubs in kvcommons/pb from the contracts in protos/.

`make protos` runs it; with `--check` it compares instead of writing, which `make check` does. Stubs land
flat in kvcommons/pb although the proto files lie in kvcommons/v1: proto file names are global in a process,
and a bare `kv.proto` would collide with etcd's.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "protos/kvcommons/v1").glob("*.proto"))
TARGET = ROOT / "kvcommons/pb"
HEADER = '"""Stubs of the contracts in protos/, made by `make protos`."""\n'


def generate(folder: Path) -> dict[str, str]:
    """Returns file name to content, with imports rewritten to kvcommons.pb."""
    arguments = ["protoc", f"-I{ROOT / 'protos'}", f"--python_out={folder}", f"--grpc_python_out={folder}"]
    arguments += [f"--mypy_out=quiet:{folder}", f"--mypy_grpc_out=quiet:{folder}"]
    if protoc.main([*arguments, *map(str, SOURCES)]):
        raise SystemExit("protoc failed")
    files = {"__init__.py": HEADER}
    for path in sorted((folder / "kvcommons/v1").iterdir()):
        text = re.sub(r"from kvcommons\.v1 import", "from kvcommons.pb import", path.read_text())
        files[path.name] = text.replace("kvcommons.v1.", "kvcommons.pb.") if path.suffix == ".pyi" else text
    return files


def main() -> int:
    # The plugins for type stubs stand beside the interpreter, which need not be on PATH.
    import os

    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    with tempfile.TemporaryDirectory() as folder:
        files = generate(Path(folder))
    if "--check" in sys.argv:
        stale = [
            name
            for name, text in files.items()
            if not (TARGET / name).exists() or (TARGET / name).read_text() != text
        ]
        extra = [path.name for path in TARGET.iterdir() if path.is_file() and path.name not in files]
        if stale or extra:
            print(f"kvcommons/pb is stale ({', '.join(stale + extra)}): run `make protos`", file=sys.stderr)
            return 1
        return 0
    TARGET.mkdir(exist_ok=True)
    for name, text in files.items():
        (TARGET / name).write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
