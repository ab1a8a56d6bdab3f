"""Clients of the kvstore's data plane: blocks in, layer by layer, and blocks out, in the background. No
torch."""
