"""Settlements of circular debts: this instance as a participant."""
