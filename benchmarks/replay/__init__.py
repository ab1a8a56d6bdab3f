"""`kvcommons replay`: the kvstore's policies on a trace, on a virtual clock."""
