"""Training a torch model through parameter servers."""

from pyps_client.torch.remote_optimizer import RemoteOptimizer, TrainingFinished
from pyps_client.torch.sandblasting import SandblasterResult, sandblaster

__all__ = ["RemoteOptimizer", "SandblasterResult", "TrainingFinished", "sandblaster"]
