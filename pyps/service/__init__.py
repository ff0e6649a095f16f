"""The gRPC faces of a run: one file a service, and what all of them share."""
