"""Memory borrowed from other holders: loans, creditors, and the ledger that names them."""
