"""Answers that keep to a grammar: what may be asked for, compiled grammars, and where an answer stands."""
