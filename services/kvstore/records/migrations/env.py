"""Alembic renders the steps as SQL and never connects: `schema.py` runs what it renders, over psycopg."""

from __future__ import annotations

from alembic import context

context.configure(dialect_name="postgresql")
with context.begin_transaction():
    context.run_migrations()
