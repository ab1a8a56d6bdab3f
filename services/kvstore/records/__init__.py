"""Session records: one interface, and where they may lie."""
