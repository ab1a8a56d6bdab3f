"""What prefill and decode both stand on: a loaded model with its block memory, and blocks kept in a
kvstore."""
