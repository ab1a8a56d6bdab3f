"""The ledger: who is there, how much room each has, who may lend."""
