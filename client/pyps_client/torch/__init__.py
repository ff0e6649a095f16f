"""Training a torch model through parameter servers."""

from pyps_client.torch.remote_optimizer import RemoteOptimizer, TrainingFinished

__all__ = ["RemoteOptimizer", "TrainingFinished"]
