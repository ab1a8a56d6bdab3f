"""Staggered pipelining and rotation (Lamina, section 5.1): batches that take turns at model and pool."""
