"""Training a torch model through parameter servers."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyps_client.lbfgs.run import sandblaster
    from pyps_client.lbfgs.worker import SandblasterResult
    from pyps_client.replica.processes import Block, Replica
    from pyps_client.torch.embedding import Embedding
    from pyps_client.torch.local_training import LocalTraining
    from pyps_client.torch.remote_optimizer import RemoteOptimizer

__all__ = ["Block", "Embedding", "LocalTraining", "RemoteOptimizer", "Replica", "SandblasterResult", "sandblaster"]

_LATER = {
    "Block": "pyps_client.replica.processes",
    "Embedding": "pyps_client.torch.embedding",
    "LocalTraining": "pyps_client.torch.local_training",
    "RemoteOptimizer": "pyps_client.torch.remote_optimizer",
    "Replica": "pyps_client.replica.processes",
    "SandblasterResult": "pyps_client.lbfgs.worker",
    "sandblaster": "pyps_client.lbfgs.run",
}


def __getattr__(name: str) -> Any:
    """Loads what a program asks for: some take a second, and most programs do without them."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)
