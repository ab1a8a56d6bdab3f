"""Attention over KV that lies with other holders, as the engine asks for it."""
