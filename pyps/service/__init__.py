"""The services and transports of a server."""
