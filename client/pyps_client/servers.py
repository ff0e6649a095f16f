"""All servers of a run, talked to at the same time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from pyps_client.channel import Channel
from pyps_client.connection import Connection
from pyps_client.conversion import NUMPY, Converter
from pyps_client.crew import Crew
from pyps_client.holdings import Holdings
from pyps_client.intake import Intake
from pyps_client.launch import Launch
from pyps_client.outage import Outage
from pyps_client.parking import Parking
from pyps_client.pulling import IncomingPull
from pyps_client.retry import LinkLost, RetryPolicy
from pyps_client.vectors import Vectors, check_vectors, dtype_of
from pyps_wire.codecs import Codec
from pyps_wire.common_pb2 import Role, Sender
from pyps_wire.errors import PypsError
from pyps_wire.partition import Partition

T = TypeVar("T")
Task = Callable[[threading.Event], T]
Operation = Callable[[Channel, threading.Event], T]

# How long an interrupted caller waits for a server to be done with its memory.
SETTLE_SECONDS = 3.0


class Servers:
    """A connection a server. Operations on several run at once, each through losses of its connection.

    Where something is given or returned server by server, it is for those of `connections`, in their order.
    """

    def __init__(
        self,
        launch: Launch,
        *,
        rejoin: Callable[[Connection, Channel, float], object],
        contacts: Sequence[int] | None = None,
    ) -> None:
        """`rejoin` introduces the caller again to a server that was lost.

        `contacts`: the indices of the servers that the caller has to do with, 0 first; by default all. No other is
        ever called.
        """
        indices = range(len(launch.servers)) if contacts is None else contacts
        outage = Outage()
        self.connections = [Connection(index, launch=launch, outage=outage) for index in indices]
        self._rejoin = rejoin
        self._loss = RetryPolicy(launch.loss_wait_seconds, "loss_wait_seconds")
        self._crew = Crew()

    def __iter__(self) -> Iterator[Connection]:
        return iter(self.connections)

    def on_all(self, operations: Sequence[Operation[T]]) -> list[T]:
        """Runs one operation a server and returns their results, in the servers' order; raises the first failure."""
        pairs = zip(self.connections, operations, strict=True)
        return self._run([partial(self._persist, connection, operation) for connection, operation in pairs])

    def on_first(self, operation: Operation[T]) -> T:
        """Runs an operation on server 0."""
        return self._run([partial(self._persist, self.connections[0], operation)])[0]

    def intakes(
        self, vectors: Vectors, holdings: Holdings, *, codec: Codec, converter: Converter = NUMPY
    ) -> list[Intake]:
        """The way of each server's parameters into the vectors, one a group, which travel in that codec.

        The vectors are of the codec's type, or float32, into which they are converted.
        """
        dtype = dtype_of(codec, converted=bool(vectors) and vectors[0].dtype == np.float32)
        check_vectors(vectors, holdings.partition.model, dtype, what="pulled parameters", writable=True)
        return [
            Intake(
                *(vectors, holdings.of_server[connection.index]),
                codec=codec,
                name=connection.name,
                converter=converter,
            )
            for connection in self.connections
        ]

    def read(
        self,
        sender: Sender,
        role: Role,
        intakes: Sequence[Intake],
        *,
        parking: Parking,
        min_versions: Sequence[Mapping[int, int]],
        lent: bool = False,
    ) -> set[int]:
        """Brings what is newer than held; returns changed shard ids.

        Waits for `min_versions`, shard id to version for each server, while `parking` lasts. `lent`: the vectors are.
        """
        pulls = [
            IncomingPull(
                *(sender, role, intake), connection=connection, min_versions=wanted, parking=parking, lent=lent
            )
            for connection, intake, wanted in zip(self.connections, intakes, min_versions, strict=True)
        ]
        return set().union(*self.on_all(pulls))

    def hurry(self, seconds: float) -> None:
        """Ends waits for lost servers, those under way too, so long after they were lost: the worker ends."""
        self._loss.hurry(seconds)

    def give_up(self) -> None:
        """Ends waits under way and lets nothing new begin; the connections stay."""
        self._crew.close()

    def close(self) -> None:
        """Ends the connections for good."""
        self._crew.close()
        for connection in self.connections:
            connection.close()

    def _persist(self, connection: Connection, operation: Operation[T], stop: threading.Event) -> T:
        return connection.persist(operation, rejoin=self._rejoin, stop=stop, policy=self._loss)

    def _run(self, tasks: Sequence[Task[T]]) -> list[T]:
        try:
            return self._crew.run(tasks, cut=self._cut)
        except Exception:
            raise
        except BaseException:
            # Ctrl-C. Nobody may write into the caller's vectors once this has left.
            self._cut()
            self._settle()
            raise

    def _cut(self) -> None:
        for connection in self.connections:
            connection.cut()

    def _settle(self) -> None:
        """Waits, for SETTLE_SECONDS, until servers are done with memory that they share; opens the links anew."""
        local = [connection for connection in self.connections if connection.is_local]
        self._crew.run([partial(self._greet, connection) for connection in local], cut=self._cut)

    def _greet(self, connection: Connection, _: threading.Event) -> None:
        # A server answers Hello when no earlier request of the caller works in its memory any more.
        with contextlib.suppress(LinkLost, PypsError):
            self._rejoin(connection, connection.channel, SETTLE_SECONDS)


def contacts_of(own: Partition, whole: Partition, *, leads: bool) -> list[int]:
    """The servers that a process of a replica has to do with: server 0 and those that hold shards of its parts.

    The leader, which a worker of one process is, has to do with those that hold nobody's, too: they are of the run.
    """
    return [
        index
        for index in range(whole.num_servers)
        if index == 0 or own.of_server(index) or (leads and not whole.of_server(index))
    ]
