"""gRPC between the services: servers, channels, discovery, and the life of a process."""
