"""Partial attention over paged KV, and the exact merge of partials (torch, no I/O)."""
