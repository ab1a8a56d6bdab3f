"""What computes: two interfaces for operators and attention, and their implementations."""
