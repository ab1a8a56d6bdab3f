"""The shared library of kvcommons. It imports no service."""
