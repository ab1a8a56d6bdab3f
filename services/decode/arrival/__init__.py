"""From a reservation to the first token."""
