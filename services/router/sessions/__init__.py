"""Sessions as the router sees them: the store's calls, messages, context and truncation."""
