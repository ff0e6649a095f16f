"""One process's message of a run's first parameters, and the election's lease that is kept meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType

from pyps_client.channel import Channel
from pyps_client.connection import Connection, call_seconds
from pyps_client.retry import SIGNAL_SECONDS, LinkLost
from pyps_client.vectors import Vector, check_vectors, part_of
from pyps_wire.codecs import FLOAT32
from pyps_wire.common_pb2 import CODEC_FLOAT32, OptimizerSettings, Sender
from pyps_wire.errors import PypsError, Superseded
from pyps_wire.framing import join
from pyps_wire.parameter_server_pb2 import HelloReply, InitializeReply, InitializeRequest
from pyps_wire.partition import Partition, ShardRange

# A run's first parameters: one vector a group, or what makes a shard's numbers when they are sent.
Values = Sequence[Vector] | Callable[[ShardRange], Vector]


class Initialization:
    """What one process of an elected worker sends: the shards of its own partition."""

    def __init__(
        self,
        sender: Sender,
        *,
        term: int,
        partition: Partition,
        optimizer: OptimizerSettings,
        values: Values,
        whole: Partition | None = None,
        replica: str = "",
    ) -> None:
        """`whole`: the run's partition, where the sender's own is of some parts only; `optimizer` is for the whole."""
        if not callable(values):
            check_vectors(values, partition.model, FLOAT32.dtype, what="initial parameters")
            values = partial(part_of, values)
        self._sender = sender
        self._term = term
        self._partition = partition
        self._whole = whole or partition
        self._optimizer = optimizer
        self._replica = replica
        self._values = values

    def has_shards_for(self, connection: Connection) -> bool:
        """Whether a server is to get numbers from this process."""
        return bool(self._partition.of_server(connection.index))

    def send_to(self, connection: Connection, channel: Channel) -> None:
        """Sends a server its shards. For server 0 last: its reply makes the run ready for all."""
        shards = self._partition.of_server(connection.index)
        timeout_seconds = call_seconds(4 * sum(shard.length for shard in shards))
        frames = self._frames(connection.index)
        reply = channel.send("Initialize", frames, InitializeReply, timeout_seconds=timeout_seconds)
        connection.epoch = reply.epoch

    def _frames(self, server_index: int) -> Iterator[bytes]:
        """The header message, then a message a shard, each made when gRPC asks for it."""
        yield InitializeRequest(
            sender=self._sender,
            term=self._term,
            model=self._whole.model.to_proto(),
            optimizer=self._optimizer,
            server_index=server_index,
            num_servers=self._partition.num_servers,
            replica=self._replica,
        ).SerializeToString()
        for shard in self._partition.of_server(server_index):
            header = InitializeRequest(
                sender=self._sender, term=self._term, shard_id=shard.shard_id, codec=CODEC_FLOAT32
            )
            yield join(header, self._values(shard).data)


class Lease:
    """Keeps an election alive by a Hello to server 0 now and then; notices when it is lost all the same."""

    def __init__(self, term: int, lease_seconds: float, hello: Callable[[], HelloReply]) -> None:
        self._term = term
        self._interval_seconds = (lease_seconds or 10.0) / 3
        self._hello = hello
        self._ended = threading.Event()
        self._lost = False
        self._thread = threading.Thread(target=self._keep, name="pyps-initialize-lease", daemon=True)

    def check(self) -> None:
        """Raises Superseded when another worker's turn has come."""
        if self._lost:
            raise Superseded("another worker was elected to initialise the run")

    def __enter__(self) -> Lease:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        while self._thread.is_alive():
            self._thread.join(SIGNAL_SECONDS)

    def held(self) -> bool:
        """Asks server 0 whether the election still stands."""
        if not self._lost:
            reply = self._hello()
            self._lost = not reply.initialize or reply.term != self._term
        return not self._lost

    def _keep(self) -> None:
        while not self._ended.wait(self._interval_seconds):
            try:
                if not self.held():
                    return
            except LinkLost:
                # The sender will meet the same trouble, and reports it.
                continue
            except PypsError:
                self._lost = True
                return
