"""Lanes: one TCP connection a worker, for gradients and parameters."""
