"""The continuous batch: the engine as decode runs it, and what it reports to the event loop."""
