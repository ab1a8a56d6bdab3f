"""Staggered pipelining and rotation (Lamina, section 5.1): batches that alternate at model and pool."""
