"""Reads a run's parameters without taking part in it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from pyps_client import uncaught
from pyps_client.client import split_tensors
from pyps_client.connection import Connection
from pyps_client.crew import Crew
from pyps_client.handshake import Handshake
from pyps_client.launch import Launch
from pyps_client.pulling import Held, IncomingPull
from pyps_client.retry import RetryPolicy
from pyps_wire.common_pb2 import ROLE_OBSERVER, OptimizerSettings
from pyps_wire.errors import ModelMismatch
from pyps_wire.partition import Model, partition


class Observer:
    """A reader of a run, which learns the model from the servers. It never counts as a worker."""

    def __init__(self, servers: str | Sequence[str] | None = None, **launch_options: Any) -> None:
        """Connects, waiting for the servers and for the run's first parameters."""
        uncaught.install()
        launch_options.setdefault("worker_id", f"observer-{socket.gethostname()}-{os.getpid()}")
        launch = Launch.from_environment(servers, **launch_options)
        self._handshake = Handshake(launch)
        self._connections = [Connection(index, launch=launch) for index in range(len(launch.servers))]
        self._crew = Crew()
        self._closing = threading.Event()
        self._loss = RetryPolicy(launch.loss_wait_seconds, "loss_wait_seconds")
        try:
            first = self._handshake.join(self._connections, None, self._closing)[0]
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
        self._partition = partition(self.model, num_servers=first.num_servers)
        self._held = [Held(self._partition.of_server(connection.index)) for connection in self._connections]
        # What was last read, one vector a group; only what is newer is read again.
        self._vectors = [np.zeros(size, np.float32) for size in self.model.group_sizes]

    def snapshot(self) -> dict[str, npt.NDArray[np.float32]]:
        """The newest parameters, by tensor name, in arrays of the caller's own; each shard of one version."""
        pulls = [
            IncomingPull(
                *(self._handshake.sender, ROLE_OBSERVER, self._vectors),
                partition=self._partition,
                connection=connection,
                held=held,
                min_versions={},
                wait_seconds=0.0,
            )
            for connection, held in zip(self._connections, self._held, strict=True)
        ]

        def read(stop: threading.Event, *, server: int) -> set[int]:
            return self._connections[server].persist(
                pulls[server],
                rejoin=self._handshake.rejoin,
                stop=stop,
                policy=self._loss,
            )

        self._crew.run([partial(read, server=server) for server in range(len(pulls))])
        return split_tensors(self.model, self._vectors)

    @property
    def run_id(self) -> str:
        """The run's name."""
        return self._handshake.sender.run_id

    @property
    def global_step(self) -> int:
        """Updates of the run in the last snapshot: its largest shard version."""
        return max((version for held in self._held for version in held.versions.values()), default=0)

    def close(self) -> None:
        """Frees the connections."""
        self._closing.set()
        self._crew.close()
        for connection in self._connections:
            connection.close()

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
