"""The one run that a server holds: its state, its shards, its workers. No gRPC in here."""
