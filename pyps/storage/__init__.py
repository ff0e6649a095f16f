"""What a run leaves on disk: checkpoints, complete or ignored, and update logs. No gRPC in here."""
