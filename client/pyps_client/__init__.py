"""The worker's side of pyps: joins a run, pushes gradients and pulls parameters, or computes for a coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyps_client.arrays import Client, Observer
from pyps_client.launch import Launch
from pyps_client.leave import install_process_hooks
from pyps_client.version import VERSION as __version__
from pyps_client.worker import Worker as Session
from pyps_wire.errors import (
    ConfigurationError,
    ConnectionFailed,
    ForkedClient,
    InvalidArgument,
    LimitExceeded,
    ModelMismatch,
    NameHeld,
    NotAllowed,
    NotAuthenticated,
    NotFinite,
    OptimizerMismatch,
    ProtocolMismatch,
    PypsError,
    ReplicaLost,
    RunEnded,
    RunFinished,
    RunMismatch,
    ScheduleOwned,
    ServerUnavailable,
    SettingsChanged,
    StateLost,
    Superseded,
    UnsupportedOptimizer,
    WaitTimedOut,
)

if TYPE_CHECKING:
    from pyps_client.torch import Embedding, LocalTraining, RemoteOptimizer, SandblasterResult, sandblaster

__all__ = [
    "Client",
    "ConfigurationError",
    "ConnectionFailed",
    "Embedding",
    "ForkedClient",
    "InvalidArgument",
    "Launch",
    "LimitExceeded",
    "LocalTraining",
    "ModelMismatch",
    "NameHeld",
    "NotAllowed",
    "NotAuthenticated",
    "NotFinite",
    "Observer",
    "OptimizerMismatch",
    "ProtocolMismatch",
    "PypsError",
    "RemoteOptimizer",
    "ReplicaLost",
    "RunEnded",
    "RunFinished",
    "RunMismatch",
    "SandblasterResult",
    "ScheduleOwned",
    "ServerUnavailable",
    "Session",
    "SettingsChanged",
    "StateLost",
    "Superseded",
    "UnsupportedOptimizer",
    "WaitTimedOut",
    "__version__",
    "install_process_hooks",
    "sandblaster",
]

_NEEDS_TORCH = ("Embedding", "LocalTraining", "RemoteOptimizer", "SandblasterResult", "sandblaster")


def __getattr__(name: str) -> Any:
    """Loads what needs torch on first use: the rest works without it."""
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module 'pyps_client' has no attribute {name!r}")
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"pyps_client.{name} needs torch, which is not installed: pip install 'torch>=2.4'. "
            "pyps_client.Client works without it."
        ) from None
    from pyps_client import torch as torch_client

    return getattr(torch_client, name)
