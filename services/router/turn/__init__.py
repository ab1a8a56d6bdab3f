"""One request: its plan, its turn's state machine, and the calls that carry it out."""
