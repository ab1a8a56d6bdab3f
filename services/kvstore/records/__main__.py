"""`kvcommons records`, or `python -m services.kvstore.records` where there are but services."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from kvcommons.errors import InvalidInput, KVCommonsError
from services.kvstore.records.destination import Destination, FolderDestination
from services.kvstore.records.move import AT_ONCE, Tally, move
from services.kvstore.records.source import Source, folders_in

PROGRESS_SESSIONS = 100  # then at twice as many, and so on
NAMED_MAX = 20  # sessions that a message names

_MOVE = """\
Moves the session records of kvstores that are stopped to a database, or to one kvstore's folder: of
each session the newest state that is in any of the folders. It can be killed and started again at any
moment: a session is one transaction, and one that is there already, at its version or a later one, is
left as it is. The folders are left as they were. KV is not moved: it is computed again.
"""


def main(argv: Sequence[str]) -> int:
    """The exit status: 0, 1 where not all is there in the end, 2 for wrong usage."""
    options = _parser().parse_args(argv)
    try:
        return asyncio.run(_move(options))
    except KVCommonsError as error:
        print(f"kvcommons records move: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, InvalidInput) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvcommons records", description="Session records of stacks that are stopped."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    move = commands.add_parser("move", help="to a database, or to one kvstore's folder", description=_MOVE)
    move.add_argument(
        "--data",
        type=Path,
        required=True,
        nargs="+",
        metavar="DIR",
        help="what `--data` of `kvcommons up` names, or the folders of all kvstores",
    )
    move.add_argument(
        "--to",
        required=True,
        metavar="URL|DIR",
        help="postgresql://USER@HOST/DATABASE, as the setting `records` has it, or a folder",
    )
    move.add_argument(
        "--password-file",
        type=Path,
        metavar="FILE",
        help="of the database (default: PGPASSFILE, or PGPASSWORD)",
    )
    move.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="NAME",
        help="a kvstore whose folder is lost: go on without what only it has",
    )
    return parser


async def _move(options: argparse.Namespace) -> int:
    folders = folders_in(options.data)
    source = Source(folders, options.without)
    try:
        print(f"From {', '.join(map(str, folders))}", flush=True)
        destination, place = _destination(options.to, options.password_file, folders)
        try:
            tally = await move(source, destination, _Progress())
        finally:
            await destination.close()
        documents = source.documents()
    finally:
        source.close()
    if documents:
        print(f"Documents that were on their way are not moved, send them again: {_named(documents)}")
    return _report(tally, place)


def _destination(to: str, password_file: Path | None, folders: Sequence[Path]) -> tuple[Destination, str]:
    """And what people call it."""
    if "://" not in to:
        path = Path(to)
        if path.resolve() in folders:
            raise InvalidInput(f"{path} is one of the folders that are read: name another one", param="to")
        return FolderDestination(path), str(path)
    for package in ("psycopg", "alembic"):
        if importlib.util.find_spec(package) is None:
            raise InvalidInput(
                f"records in a database need {package}, which is not installed: pip install "
                "'kvcommons[postgres]'",
                param="to",
            )
    from services.kvstore.records.address import conninfo_of, place_of
    from services.kvstore.records.destination_database import DatabaseDestination

    conninfo = conninfo_of(to, password_file)
    return DatabaseDestination(conninfo, connections=AT_ONCE), place_of(conninfo)


class _Progress:
    def __init__(self) -> None:
        self._next = PROGRESS_SESSIONS

    def __call__(self, tally: Tally) -> None:
        if tally.sessions >= self._next:
            print(f"{tally.sessions:,} sessions so far", flush=True)
            self._next *= 2


def _report(tally: Tally, place: str) -> int:
    print(f"In the folders: {_counted(tally.sessions, tally.tokens)}")
    print(f"Of these in {place}: {_counted(tally.sessions_there, tally.tokens_there)}")
    print(f"Moved now: {tally.moved:,}; there before: {tally.sessions - tally.moved:,}")
    if tally.disputed:
        print(
            "Of some, folders had two states with the same stamp, which cannot be, and the longer one was "
            f"taken: {_named(tally.disputed)}"
        )
    if tally.kept:
        print(
            "Of some, what is there is not what the folders have, and was left as it is. If the folders are "
            f"right, delete the session there, and move again: {_named(tally.kept)}"
        )
    return 1 if tally.kept else 0


def _counted(sessions: int, tokens: int) -> str:
    return f"{sessions:,} session{'s' * (sessions != 1)} with {tokens:,} token{'s' * (tokens != 1)}"


def _named(sessions: Sequence[tuple[str, str]]) -> str:
    names = [f"{session_id} of {tenant}" for tenant, session_id in sessions[:NAMED_MAX]]
    more = len(sessions) - len(names)
    return ", ".join(names) + (f", and {more:,} more" if more > 0 else "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
