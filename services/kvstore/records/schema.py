"""The tables of records in a database, and how they come there: by alembic's steps, which its table
`alembic_version` counts."""

from __future__ import annotations

import asyncio
import io
import logging
import threading
from pathlib import Path

import psycopg

from kvcommons.errors import DataLoss

REVISION = "0003"  # the last of the steps in `migrations/versions`

_FOLDER = Path(__file__).parent / "migrations"
_TRIES = 5
_RENDERING = threading.Lock()  # alembic keeps what it works on in a module of its own


def render(revision: str | None) -> str:
    """The SQL that leads from a revision, or from an empty database, to `REVISION`."""
    # Alembic and what it needs take long to import, and only a step that is due needs them.
    logging.getLogger("alembic").setLevel(logging.WARNING)  # it names each of its plugins as it is imported
    from alembic import command
    from alembic.config import Config

    buffer = io.StringIO()
    config = Config(output_buffer=buffer)
    config.set_main_option("script_location", str(_FOLDER).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    with _RENDERING:
        command.upgrade(config, f"{revision or 'base'}:{REVISION}", sql=True)
    # Where a database does not roll back what a killed process had created, it is there without a row.
    return buffer.getvalue().replace("CREATE TABLE alembic", "CREATE TABLE IF NOT EXISTS alembic")


async def migrate(connection: psycopg.AsyncConnection[tuple[object, ...]]) -> None:
    """Brings the tables up to date. The connection commits each statement by itself.

    Several kvstores may do this at once: who comes second finds the tables there, or fails and looks again.
    Raises DataLoss where a newer version of kvcommons has been here, and psycopg's errors.
    """
    for tries_left in reversed(range(_TRIES)):
        revision = await _revision(connection)
        if revision == REVISION:
            return
        if revision is not None and revision > REVISION:
            raise DataLoss(
                f"the database of records has schema {revision}; this version of kvcommons knows {REVISION}: "
                "use the version that wrote it, or a newer one"
            )
        try:
            await connection.execute((await asyncio.to_thread(render, revision)).encode())
        except (
            psycopg.errors.UniqueViolation,
            psycopg.errors.DuplicateTable,
            psycopg.errors.DuplicateObject,
            psycopg.errors.SerializationFailure,
            psycopg.errors.DeadlockDetected,
        ):
            await connection.execute("ROLLBACK")
            if not tries_left:
                raise


async def _revision(connection: psycopg.AsyncConnection[tuple[object, ...]]) -> str | None:
    """What `alembic_version` says; None before the first step."""
    try:
        cursor = await connection.execute("SELECT version_num FROM alembic_version")
    except psycopg.errors.UndefinedTable:
        return None
    row = await cursor.fetchone()
    return str(row[0]) if row is not None else None
