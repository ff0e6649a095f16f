"""Reads a run's parameters without taking part in it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pyps_client import process_hooks
from pyps_client.client import split_tensors
from pyps_client.handshake import Handshake
from pyps_client.holdings import Holdings
from pyps_client.launch import Launch
from pyps_client.parking import Parking
from pyps_client.servers import Servers
from pyps_wire.codecs import FLOAT32
from pyps_wire.common_pb2 import ROLE_OBSERVER, OptimizerSettings
from pyps_wire.errors import ModelMismatch
from pyps_wire.partition import Model, partition


class Observer:
    """A reader of a run, which learns the model from the servers. It never counts as a worker."""

    def __init__(self, servers: str | Sequence[str] | None = None, **launch_options: Any) -> None:
        """Connects, waiting for the servers and for the run's first parameters."""
        process_hooks.install_where_asked()
        launch_options.setdefault("worker_id", f"observer-{socket.gethostname()}-{os.getpid()}")
        launch = Launch.from_environment(servers, **launch_options)
        self._handshake = Handshake(launch)
        self._servers = Servers(launch, rejoin=self._handshake.rejoin)
        self._closing = threading.Event()
        try:
            first = self._handshake.join(self._servers.connections, None, self._closing)[0]
            if first.num_servers != len(launch.servers):
                raise ModelMismatch(
                    f"The run is spread over {first.num_servers} servers, {len(launch.servers)} were named: "
                    "name them all, in order."
                )
        except BaseException:
            self.close()
            raise
        self.model = Model.from_proto(first.model)
        self.optimizer: OptimizerSettings = first.optimizer
        self._holdings = Holdings(partition(self.model, num_servers=first.num_servers))
        # What was last read, one vector a group; only what is newer is read again.
        self._vectors = [np.zeros(size, np.float32) for size in self.model.group_sizes]
        self._intakes = self._servers.intakes(self._vectors, self._holdings, codec=FLOAT32)

    def snapshot(self) -> dict[str, npt.NDArray[np.float32]]:
        """The newest parameters, by tensor name, in arrays of the caller's own; each shard of one version."""
        self._servers.read(
            *(self._handshake.sender, ROLE_OBSERVER, self._intakes),
            parking=Parking(0.0),
            min_versions=[{}] * len(self._intakes),
        )
        return split_tensors(self.model, self._vectors)

    @property
    def run_id(self) -> str:
        """The run's name."""
        return self._handshake.sender.run_id

    @property
    def global_step(self) -> int:
        """Updates of the run in the last snapshot: its largest shard version."""
        return max(self._holdings.versions.values(), default=0)

    def close(self) -> None:
        """Frees the connections."""
        self._closing.set()
        self._servers.close()

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
