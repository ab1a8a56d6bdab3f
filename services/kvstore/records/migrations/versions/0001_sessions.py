"""Sessions, their turns, and which session names which block.

Every statement can be run again: two kvstores that start at once may both run them. `ASC` is the default but
for YugabyteDB, which hashes the first column of an index without it, and that of a primary key always: so
sessions and turns are spread, and lists can be read in order all the same.
"""

from __future__ import annotations

from alembic import op

revision = "0001"
down_revision = None

_STATEMENTS = (
    # Bytes, not text: their order is that of RocksDB's keys in every database, whatever its collation.
    """
    CREATE TABLE IF NOT EXISTS sessions (
        incarnation UUID PRIMARY KEY,
        key BYTEA NOT NULL,
        head BYTEA,
        blocks BIGINT NOT NULL,
        blocks_digest BYTEA NOT NULL,
        lease BYTEA,
        ends_ms BIGINT,
        last_used_ms BIGINT NOT NULL
    )
    """,
    "CREATE UNIQUE INDEX IF NOT EXISTS sessions_key ON sessions (key ASC)",
    "CREATE INDEX IF NOT EXISTS sessions_ends ON sessions (ends_ms ASC, last_used_ms ASC)",
    """
    CREATE TABLE IF NOT EXISTS turns (
        incarnation UUID NOT NULL,
        version BIGINT NOT NULL,
        turn_id TEXT,
        added BYTEA NOT NULL,
        kept_blocks BIGINT NOT NULL,
        block_ids BYTEA NOT NULL,
        PRIMARY KEY (incarnation, version)
    )
    """,
    "CREATE UNIQUE INDEX IF NOT EXISTS turns_turn_id ON turns (incarnation, turn_id)",
    """
    CREATE TABLE IF NOT EXISTS block_uses (
        block_id BYTEA NOT NULL,
        incarnation UUID NOT NULL,
        PRIMARY KEY (block_id, incarnation)
    )
    """,
    "CREATE SEQUENCE IF NOT EXISTS fencing",
)


def upgrade() -> None:
    for statement in _STATEMENTS:
        op.execute(statement)
