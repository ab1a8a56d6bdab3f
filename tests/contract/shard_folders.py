"""Folders of stacks as shards wrote them: rows of `tests/golden/shard-folders.json` in real RocksDBs.

The file was made with the classes that served such folders, on real RocksDBs, by `make_shard_folders.py`,
which goes when they go: git has it, with the commit that added the file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcommons.pb import kvstore_pb2 as pb
from services.kvstore.database import Database

STACKS: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "golden" / "shard-folders.json").read_text(encoding="utf-8")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenStack:
    """`records`: what the stack had of each session in the end, by tenant and id; `gone`: of these there is
    none, as they were deleted, or never came to a turn."""

    folders: tuple[Path, ...]
    records: dict[tuple[str, str], pb.SessionRecord]
    gone: tuple[tuple[str, str], ...]


def write_stack(name: str, root: Path) -> WrittenStack:
    """One of `STACKS`, its folders in `root`."""
    stack = STACKS[name]
    folders = []
    for folder_name, folder in stack["folders"].items():
        path = root / folder_name
        path.mkdir(parents=True)
        folders.append(path)
        (path / "lock").touch()
        for file_name, content in folder["files"].items():
            (path / file_name).write_text(content)
        table = Database(path / "sessions", sorted(folder["families"]))
        table.write(
            [
                (family, bytes.fromhex(key), bytes.fromhex(value))
                for family, rows in folder["families"].items()
                for key, value in rows.items()
            ]
        )
        table.close()
    return WrittenStack(
        folders=tuple(folders),
        records={
            (one["tenant"], one["session_id"]): pb.SessionRecord.FromString(bytes.fromhex(one["record"]))
            for one in stack["sessions"]
        },
        gone=tuple((tenant, session_id) for tenant, session_id in stack["gone"]),
    )
