"""Prefill: computes the KV of a prompt's new tokens, chunk by chunk, and samples the first token."""
