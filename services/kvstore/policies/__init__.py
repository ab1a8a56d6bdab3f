"""Which block goes first when a tier is full: one interface, no I/O, no clock."""
