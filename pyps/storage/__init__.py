"""Files of a run: checkpoints, complete or ignored, and update logs. No gRPC in here."""
