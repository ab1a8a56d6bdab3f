"""A turn says how many blocks of before it keeps: no digest of all identities is needed to see that."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.execute("ALTER TABLE sessions DROP COLUMN IF EXISTS blocks_digest")
