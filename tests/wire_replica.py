"""One process of a replica, straight on the generated stubs, and replicas of two such processes."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence

from cut_model import CUT
from pyps_wire import common_pb2 as common
from pyps_wire import parameter_server_pb2 as wire
from support import AnyServer
from wire_worker import WireWorker

_LIVES = itertools.count(time.time_ns())


def new_life() -> int:
    """An incarnation, later than all before."""
    return next(_LIVES)


class WireProcess(WireWorker):
    """The process of a replica that holds one part of the cut model; its index is the part's."""

    def __init__(self, address: str, replica: str, part: int, *, life: int):
        super().__init__(address, f"{replica}/{part}", model=CUT)
        self.sender.incarnation = life
        self.replica, self.part = replica, part
        self.own = [shard for shard in self.plan.of_server(0) if self.plan.part_of(shard.shard_id) == part]

    def hello(self, **fields: object) -> wire.HelloReply:
        """Says Hello as a process of its replica."""
        request = self.greeting(**fields)
        reply: wire.HelloReply = self.stub.Hello(request, timeout=60.0)
        self.epoch = reply.epoch
        return reply

    def greeting(self, **fields: object) -> wire.HelloRequest:
        """What it says."""
        request = wire.HelloRequest(
            sender=self.sender,
            protocol_version=1,
            software="test",
            role=common.ROLE_WORKER,
            num_servers=1,
            model=self.model.to_proto(),
            optimizer=self.optimizer,
            fingerprint=self.plan.fingerprint,
            replica=self.replica,
        )
        request.parts.append(self.part)
        for name, value in fields.items():
            if name == "parts":
                request.parts[:] = value  # type: ignore[call-overload]
            else:
                setattr(request, name, value)
        return request

    def initialize_messages(self, term: int, value: float = 0.0) -> Iterator[wire.InitializeRequest]:
        """The messages that initialise its own shards with one value."""
        own = {shard.shard_id for shard in self.own}
        for number, message in enumerate(super().initialize_messages(term, value)):
            if number == 0:
                message.replica = self.replica
                yield message
            elif message.shard_id in own:
                yield message

    def push_own(self, value: float, base_version: int = 0, **fields: object) -> list[common.Receipt]:
        """One push of all shards of its part."""
        sequence = next(self._sequences)
        return self.push(
            *(self.push_request(value, shard.shard_id, base_version, sequence=sequence, **fields) for shard in self.own)
        )


def replica(stack: contextlib.ExitStack, server: AnyServer, name: str) -> list[WireProcess]:
    """A life of a replica: its process of part 0, which leads, and that of part 1."""
    life = new_life()
    return [stack.enter_context(WireProcess(server.data, name, part, life=life)) for part in (0, 1)]


def join(processes: Sequence[WireProcess], value: float = 0.0) -> None:
    """Says Hello for all processes, and initialises the run where the replica is elected."""
    for process in processes:
        reply = process.hello()
        if reply.initialize:
            process.initialize(reply.term, value)
