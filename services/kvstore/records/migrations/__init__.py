"""What alembic runs: `versions` has one file for each step of the schema."""
