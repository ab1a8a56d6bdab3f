"""Stubs of the contracts in protos/, made by `make protos`."""
