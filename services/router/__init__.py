"""The router: REST, tenants, the job queue, and each turn's state machine with its resumption after
failures."""
