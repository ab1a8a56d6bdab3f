"""Attention pool: memory for segments of other instances' sequences, and attention over them. No model
weights."""
