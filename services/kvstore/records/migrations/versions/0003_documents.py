"""What turns under way are going to add, of those that take long: a row each, in a table that stays small."""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.execute("CREATE TABLE IF NOT EXISTS documents (incarnation UUID PRIMARY KEY, document BYTEA NOT NULL)")
