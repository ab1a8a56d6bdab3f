"""The services. None imports another; the contracts in protos/ are all they share beyond the library."""
