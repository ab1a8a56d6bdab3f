"""The job queue: which request runs next, and what the store is told of it in advance."""
