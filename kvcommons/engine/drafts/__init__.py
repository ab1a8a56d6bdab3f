"""Speculative decoding: tokens that may come next, found in what was said before, and how many of them an
iteration verifies."""
