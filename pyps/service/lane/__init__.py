"""The lane: one TCP connection a worker, for large messages beside gRPC."""
