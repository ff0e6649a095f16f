"""Training a torch model through parameter servers."""

from pyps_client.torch.remote_optimizer import RemoteOptimizer
from pyps_client.torch.replica import Block, Replica
from pyps_client.torch.sandblasting import SandblasterResult, sandblaster

__all__ = ["Block", "RemoteOptimizer", "Replica", "SandblasterResult", "sandblaster"]
