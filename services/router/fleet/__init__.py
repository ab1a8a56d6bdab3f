"""The instances that this router knows, and which of them serve a turn."""
