"""A raw worker that shares its memory with one server: what tests of the local socket speak."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pyps_wire import codecs
from pyps_wire import common_pb2 as common
from pyps_wire import local_pb2 as local
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.errors import from_status
from pyps_wire.partition import Model
from wire_worker import WireWorker

LENGTH = struct.Struct("<I")
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
REPLY_SECONDS = 30.0


def make_segment(num_bytes: int, *, seals: int = SEALS) -> int:
    """The descriptor of a memfd, allocated in full."""
    descriptor = os.memfd_create("pyps-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    os.posix_fallocate(descriptor, 0, num_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


class LocalSocket:
    """A connection to a server's local socket, one message at a time."""

    def __init__(self, address: str):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(REPLY_SECONDS)
        self.socket.connect("\0" + address[1:] if address.startswith("@") else address)

    def send(self, request: local.LocalRequest, *descriptors: int) -> None:
        message = request.SerializeToString()
        frame = LENGTH.pack(len(message)) + message
        if descriptors:
            frame = frame[socket.send_fds(self.socket, [frame], list(descriptors)) :]
        if frame:
            self.socket.sendall(frame)

    def receive(self) -> local.LocalReply:
        """The next reply, whatever it says; EOFError when the server has closed the connection."""
        (length,) = LENGTH.unpack(self._exactly(LENGTH.size))
        return local.LocalReply.FromString(self._exactly(length))

    def ask(self, request: local.LocalRequest, *descriptors: int) -> local.LocalReply:
        """The reply to a request; a refusal is raised as the error that it names."""
        self.send(request, *descriptors)
        reply = self.receive()
        if reply.HasField("failure"):
            raise from_status(reply.failure.status, reply.failure.details, reply.failure.name)
        return reply

    @property
    def is_closed_by_the_server(self) -> bool:
        """Waits for the server's next word: True when that is its end of the connection."""
        return self.socket.recv(1, socket.MSG_PEEK) == b""

    def close(self) -> None:
        self.socket.close()

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self.socket.recv(count - len(data))
            if not more:
                raise EOFError("the server closed the connection")
            data += more
        return data


class Layout:
    """Where a model's vectors lie in a segment: each on a page, behind one for the nonce."""

    def __init__(self, model: Model, *, gradients: int = 1, codec: int = common.CODEC_FLOAT32, pull_codec: int = 0):
        self.model = model
        self.codec, self.pull_codec = codec, pull_codec or codec
        self._end = mmap.PAGESIZE
        self.gradients = [self._vectors(self.codec) for _ in range(gradients)]
        self.parameters = self._vectors(self.pull_codec)
        self.num_bytes = self._end

    def _vectors(self, codec: int) -> local.LocalVectors:
        offsets = []
        for size in self.model.group_sizes:
            offsets.append(self._end)
            self._end += -(-size * codecs.item_size(codec) // mmap.PAGESIZE) * mmap.PAGESIZE
        return local.LocalVectors(codec=codec, offsets=offsets)  # type: ignore[arg-type]


class LocalWorker(WireWorker):
    """A worker with memory of its own; Hello and its like go over gRPC, rounds through the local socket.

    One with `parts` holds those of the model alone.
    """

    def __init__(
        self,
        address: str,
        worker_id: str = "a",
        *,
        gradients: int = 1,
        codec: int = 0,
        parts: Sequence[int] = (),
        replica: str = "",
        **options: Any,
    ):
        super().__init__(address, worker_id, **options)
        self.parts, self.replica = list(parts), replica
        self.own = self.plan.of_parts(parts) if parts else self.plan
        self.layout = Layout(self.own.model, gradients=gradients, codec=codec or common.CODEC_FLOAT32)
        self.offer = wire.LocalTransport()
        self.descriptor = make_segment(self.layout.num_bytes)
        self.memory = mmap.mmap(self.descriptor, self.layout.num_bytes)
        self.nonce = secrets.randbits(64)
        self.memory[:8] = self.nonce.to_bytes(8, "little")
        self.gradients = [self._arrays(vectors) for vectors in self.layout.gradients]
        self.parameters = self._arrays(self.layout.parameters)
        self.versions: dict[int, int] = {}
        self.link: LocalSocket | None = None

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.detach()
        os.close(self.descriptor)

    def hello(self, **fields: object) -> wire.HelloReply:
        """Says Hello, and keeps the server's offer."""
        reply = super().hello(**{"parts": self.parts, "replica": self.replica, **fields})
        self.offer = reply.local
        return reply

    def attach_request(self, **fields: object) -> local.LocalRequest:
        """What the worker attaches; `fields` replace what it says."""
        attach = local.LocalAttach(
            sender=self.sender,
            ticket=self.offer.ticket,
            segment_bytes=self.layout.num_bytes,
            gradients=self.layout.gradients,
            parameters=self.layout.parameters,
        )
        for name, value in fields.items():
            if isinstance(value, int | bytes):
                setattr(attach, name, value)
            elif isinstance(value, list):
                attach.ClearField(name)  # type: ignore[arg-type]
                getattr(attach, name).extend(value)
            else:
                getattr(attach, name).CopyFrom(value)
        return local.LocalRequest(attach=attach)

    def attach(self) -> LocalSocket:
        """Connects and hands the memory over; the server has read its nonce."""
        self.link = LocalSocket(self.offer.address)
        reply = self.link.ask(self.attach_request(), self.descriptor)
        assert reply.attached.nonce == self.nonce
        return self.link

    def detach(self) -> None:
        """Hangs up."""
        if self.link is not None:
            self.link.close()
            self.link = None

    def begin(self) -> None:
        """Joins, attaches and pulls everything."""
        self.join()
        self.attach()
        self.pull_here()

    def exchange_request(
        self,
        shard_ids: Sequence[int] | None = None,
        *,
        pull: bool = True,
        gradients: int = 0,
        each: Mapping[str, object] | None = None,
    ) -> local.LocalRequest:
        """One push of these shards (of all), at the versions held; `each` goes into every shard's part."""
        mine = [shard.shard_id for shard in self.own.of_server(self.server_index)]
        sequence = next(self._sequences)
        exchange = local.LocalExchange(gradients=gradients, pull=pull)
        for shard_id in mine if shard_ids is None else shard_ids:
            fields: dict[str, Any] = {
                "sequence": sequence,
                "shard_id": shard_id,
                "base_version": self.versions.get(shard_id, 0),
                "held_version": self.versions.get(shard_id, -1),
                "epoch": self.epoch,
                "kind": common.PAYLOAD_KIND_GRADIENT,
                "example_count": 1,
                "num_shards": len(mine),
                **(each or {}),
            }
            exchange.shards.add(**fields)
        return local.LocalRequest(exchange=exchange)

    def exchange(self, shard_ids: Sequence[int] | None = None, **options: Any) -> list[wire.ExchangeReply]:
        """A round: pushes what lies in the gradient vectors, notes the versions that came back."""
        return self.exchanged(self.exchange_request(shard_ids, **options))

    def exchanged(self, request: local.LocalRequest) -> list[wire.ExchangeReply]:
        """Sends an exchange and notes the versions that came back."""
        assert self.link is not None
        replies = list(self.link.ask(request).exchanged.replies)
        for reply in replies:
            if reply.codec:
                self.versions[reply.receipt.shard_id] = reply.version
        return replies

    def pull_request(
        self, min_versions: Mapping[int, int] | None = None, *, wait_seconds: float = 20.0
    ) -> local.LocalRequest:
        """Asks for all shards that are newer than those held."""
        wants = [
            wire.PullRequest.Want(
                shard_id=shard.shard_id,
                held_version=self.versions.get(shard.shard_id, -1),
                min_version=(min_versions or {}).get(shard.shard_id, 0),
            )
            for shard in self.own.of_server(self.server_index)
        ]
        request = wire.PullRequest(epoch=self.epoch, wants=wants, wait_milliseconds=round(wait_seconds * 1000))
        return local.LocalRequest(pull=local.LocalPull(request=request))

    def pull_here(self, min_versions: Mapping[int, int] | None = None, **options: Any) -> list[wire.Parameters]:
        """Lets newer parameters be written into the memory; what was written."""
        assert self.link is not None
        shards = list(self.link.ask(self.pull_request(min_versions, **options)).pulled.shards)
        self.versions.update({shard.shard_id: shard.version for shard in shards})
        return shards

    def _arrays(self, vectors: local.LocalVectors) -> list[npt.NDArray[Any]]:
        dtype = codecs.dtype_of(vectors.codec)
        return [
            np.frombuffer(self.memory, dtype, size, offset)
            for size, offset in zip(self.own.model.group_sizes, vectors.offsets, strict=True)
        ]


@contextmanager
def local_worker(address: str, worker_id: str = "a", **options: Any) -> Iterator[LocalWorker]:
    """A worker that has joined, attached its memory and holds the parameters."""
    with LocalWorker(address, worker_id, **options) as worker:
        worker.begin()
        yield worker


def maps_of(pid: int) -> list[str]:
    """The memfd mappings in a process."""
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "memfd:" in line]


def descriptors_of(pid: int) -> list[str]:
    """What a process has open that concerns local workers: memfds and sockets."""
    found = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.fspath(descriptor.readlink())
        except FileNotFoundError:
            continue
        if "memfd:" in target or target.startswith("socket:"):
            found.append(target)
    return found


def segments_of(pid: int) -> set[int]:
    """The memfds that a process maps or has open, by inode: no two at a time share one."""
    found = {int(line.split()[4]) for line in maps_of(pid)}
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if "memfd:" in os.fspath(descriptor.readlink()):
                found.add(descriptor.stat().st_ino)
        except FileNotFoundError:
            continue
    return found
