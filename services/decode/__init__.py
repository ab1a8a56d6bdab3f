"""Decode: continuous batching over sequences whose KV lies on this holder and on others."""
