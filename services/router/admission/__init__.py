"""The request queue: which request runs next, and which hints the store gets of it."""
