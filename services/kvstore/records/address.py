"""Where a database of records is: what libpq takes, and what may be shown of it."""

from __future__ import annotations

import os
from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from kvcommons.errors import InvalidInput

SCHEMES = ("postgresql://", "postgres://")
EXPECTED = "postgresql://USER@HOST:5432/DATABASE?sslmode=verify-full"


def conninfo_of(url: str, password_file: Path | None) -> str:
    """Raises InvalidInput, which repeats nothing of the URL that may be a password."""
    try:
        if not url.startswith(SCHEMES):
            raise psycopg.ProgrammingError("another scheme")
        found = conninfo_to_dict(url)
        if any("@" in str(found.get(name)) for name in ("host", "port", "dbname")):
            raise psycopg.ProgrammingError("an @ behind the host: write %40 for it, and %2F for a /")
    except psycopg.ProgrammingError as error:
        reason = str(error).partition(":")[0].strip()  # behind the colon, libpq repeats the URL
        raise InvalidInput(
            f"records is no URL that libpq understands ({reason}): expected {EXPECTED}, or nothing for "
            "records in the kvstore's own folder",
            param="records",
        ) from None
    if "password" in found:
        raise InvalidInput(
            "records has a password in it, where whoever reads the settings sees it: put it into a file that "
            "records_password_file names, into PGPASSFILE, or into PGPASSWORD",
            param="records",
        )
    if password_file is None:
        return url
    try:
        password = password_file.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(
            f"records_password_file: {password_file} cannot be read: {error}", param="records_password_file"
        ) from error
    return make_conninfo(url, password=password)


def place_of(conninfo: str) -> str:
    """Host and database, for people."""
    found = conninfo_to_dict(conninfo)

    def said(name: str, variable: str, otherwise: str) -> str:
        return str(found.get(name) or os.environ.get(variable) or otherwise)

    host, port = said("host", "PGHOST", "localhost"), said("port", "PGPORT", "5432")
    return f"{host}:{port}/{said('dbname', 'PGDATABASE', said('user', 'PGUSER', ''))}"
