"""The router: REST, tenants, the request queue, and each turn's state machine with its resumption after
failures."""
