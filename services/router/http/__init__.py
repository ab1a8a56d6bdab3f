"""The HTTP server: connections, middleware, authentication."""
