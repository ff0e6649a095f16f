"""A worker's memory in the server's address space, laid out by the run's shards."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple

from pyps import logs
from pyps.core.gradient import NATIVE, Reply, SharedMemory
from pyps.core.membership import Membership
from pyps.core.store import Store
from pyps_wire import common_pb2 as common
from pyps_wire import local_pb2 as local
from pyps_wire.codecs import FLOAT32, Codec, codec_numbered
from pyps_wire.contract import GRADIENT_BUFFERS_MAX
from pyps_wire.errors import InvalidArgument, NotInitialized
from pyps_wire.partition import Partition

NONCE_BYTES = 8
ALIGNMENT_BYTES = 64

# From Linux's fcntl.h; Python names only some, and on Linux only.
_F_GET_SEALS = 1034
# Against further seals, shrinking and growing.
_SEALED = 0x1 | 0x2 | 0x4
# Against writing, and against writing by later mappings.
_READ_ONLY = 0x8 | 0x10

# The unit of st_blocks.
_BLOCK_BYTES = 512
# Smaller memory is unmapped at once; large memory takes up to 0.2 s a GiB.
AT_ONCE_BYTES = 4 * 2**20
# Memory is unmapped in pieces: meanwhile the process cannot map memory.
_PIECE_BYTES = 64 * 2**20

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

log = logs.get("pyps.service")


class Segment(SharedMemory):
    """A worker's memory in this process's address space, until it is closed and no user holds it.

    Its worker can neither shrink nor grow it, so that touching it cannot end the server. Every method may be called
    from any thread.
    """

    def __init__(self, descriptor: int, *, num_bytes: int, hand_over: Callable[[Callable[[], None]], None]):
        """Map a sealed memfd, else InvalidArgument; it may be closed then. `hand_over` runs long work on a thread."""
        require_sealed(descriptor, num_bytes=num_bytes)
        try:
            self._memory = mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            raise InvalidArgument(f"the segment of {num_bytes} bytes cannot be mapped: {error.strerror}") from None
        self.num_bytes = num_bytes
        self._hand_over = hand_over
        self._views: list[memoryview] = []
        self._lock = Lock()
        # Guarded by _lock. The owner, which closes the memory, is a user.
        self._num_users = 1
        # Done once the memory is closed and has no user.
        self.unused: Future[None] = Future()
        # So that no waiter can cancel it.
        self.unused.set_running_or_notify_cancel()

    @property
    def nonce(self) -> int:
        """Return the number that the worker wrote at the start of the memory."""
        return int.from_bytes(self._memory[:NONCE_BYTES], "little")

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """Return a part of the memory; use it while the memory is open or held."""
        with memoryview(self._memory) as whole:
            view = whole[offset : offset + num_bytes]
        self._views.append(view)
        return view

    def hold(self) -> None:
        """Keep the memory mapped until `let_go`; ServerUnavailable if it is closed already."""
        with self._lock:
            self.require_attached()
            self._num_users += 1

    def let_go(self) -> None:
        """End one hold; the last one unmaps the memory."""
        with self._lock:
            self._num_users -= 1
            is_last = self._num_users == 0
        if is_last:
            self.unused.set_result(None)
            if self.num_bytes < AT_ONCE_BYTES:
                self._unmap()
            else:
                self._hand_over(self._unmap)

    def close(self) -> None:
        """Unmap the memory, now or when no user holds it. May be called again."""
        with self._lock:
            attached, self.attached = self.attached, False
        if attached:
            self.let_go()

    def _unmap(self) -> None:
        try:
            for view in self._views:
                view.release()
            _forget_pages(self._memory, self.num_bytes)
            self._memory.close()
        except BufferError:
            # The memory is unmapped when the last user of a part ends.
            log.warning("a worker's memory is still in use after its last request", bytes=self.num_bytes)


def _forget_pages(memory: mmap.mmap, num_bytes: int) -> None:
    """Unmap the pages, which takes long; mmap's own close would stop all threads for it."""
    begin = ctypes.c_char.from_buffer(memory)
    address = ctypes.addressof(begin)
    del begin
    for offset in range(0, num_bytes, _PIECE_BYTES):
        _LIBC.madvise(address + offset, min(_PIECE_BYTES, num_bytes - offset), mmap.MADV_DONTNEED)


def require_sealed(descriptor: int, *, num_bytes: int) -> None:
    """Refuse memory that its worker could shrink while the server uses it, or that the server cannot write."""
    try:
        seals = fcntl.fcntl(descriptor, _F_GET_SEALS)
    except OSError:
        raise InvalidArgument(
            "the descriptor that came with Attach is no memfd: only such memory can be sealed"
        ) from None
    if seals & _SEALED != _SEALED or seals & _READ_ONLY:
        raise InvalidArgument(
            f"the segment's seals are {seals:#x}: seal it against shrinking, growing and further seals ({_SEALED:#x}),"
            " and not against writing"
        )
    status = os.fstat(descriptor)
    if status.st_size != num_bytes:
        raise InvalidArgument(f"the segment has {status.st_size} bytes, and Attach says {num_bytes}")
    if (page := os.fstatvfs(descriptor).f_bsize) != mmap.PAGESIZE:
        # Where huge pages run out, a process that touches a missing one is killed.
        raise InvalidArgument(f"the segment lies in pages of {page} bytes; expected ordinary ones of {mmap.PAGESIZE}")
    if (allocated := status.st_blocks * _BLOCK_BYTES) < num_bytes:
        # The process that touches a page first allocates it; no caller may make the server do so.
        raise InvalidArgument(
            f"{allocated} of the segment's {num_bytes} bytes are there: allocate it in full (posix_fallocate) first"
        )


class Vectors(NamedTuple):
    """Numbers of one codec in the worker's memory, by shard."""

    codec: Codec
    shards: Mapping[int, memoryview]


class Content(NamedTuple):
    """The run's shards on this server, as they were when the memory was attached."""

    run_id: str
    epoch: int
    plan: Partition
    # The plan of the parts that the worker holds; `plan` itself where it holds all.
    own: Partition
    server_index: int
    shards: Mapping[int, Store]


@dataclass(frozen=True)
class Attachment:
    """A worker's memory and the shards that it was laid out for."""

    # The worker, with its secret.
    sender: common.Sender = field(repr=False)
    content: Content
    memory: Segment
    gradients: Sequence[Vectors]
    codec: Codec
    # The place of each shard's parameters.
    replies: Mapping[int, Reply]

    @classmethod
    def make(cls, request: local.LocalAttach, memory: Segment, content: Content) -> Attachment:
        sender, parameters = common.Sender(), _vectors(request.parameters, memory, content)
        sender.CopyFrom(request.sender)
        sender.run_id = content.run_id
        return cls(
            sender,
            content,
            memory,
            [_vectors(vectors, memory, content) for vectors in request.gradients],
            parameters.codec,
            {shard_id: Reply(view, 0, parameters.codec) for shard_id, view in parameters.shards.items()},
        )

    def require_laid_out(self, shard_id: int, membership: Membership) -> None:
        """Refuse a shard that has no place in the memory: another server's, or a part's that was not declared."""
        content = self.content
        if shard_id in self.replies:
            return
        if shard_id not in content.shards:
            raise InvalidArgument(
                f"shard {shard_id} is not on server {content.server_index}, which holds {len(content.shards)} of the "
                f"model's {content.plan.num_shards}"
            )
        membership.require_part(self.sender.worker_id, shard_id, content.plan.part_of(shard_id))
        raise NotInitialized("the worker declares other parts since this memory was attached: attach it again")

    def require_sender(self, sender: common.Sender) -> None:
        """Refuse another sender than the worker that attached; an empty sender means that worker."""
        own = self.sender
        worker_id, incarnation = sender.worker_id or own.worker_id, sender.incarnation or own.incarnation
        run_id = sender.run_id or own.run_id
        if (worker_id, incarnation, run_id) != (own.worker_id, own.incarnation, own.run_id):
            raise InvalidArgument(
                f"the request is of worker {worker_id!r} ({incarnation}) of run {run_id!r}, on a connection of worker "
                f"{own.worker_id!r} ({own.incarnation}) of run {own.run_id!r}"
            )

    def require_shards(self, shards: Mapping[int, Store]) -> None:
        """Refuse a request once the run has other shards than the memory was laid out for."""
        if shards is not self.content.shards:
            raise NotInitialized("the run was reset since this memory was attached: say Hello, then attach it again")


def check_layout(request: local.LocalAttach, content: Content) -> None:
    """Refuse vectors that lie outside the segment or overlap, and a segment larger than they need."""
    if not 1 <= len(request.gradients) <= GRADIENT_BUFFERS_MAX:
        count = len(request.gradients)
        raise InvalidArgument(f"Attach names {count} sets of gradients; expected 1 to {GRADIENT_BUFFERS_MAX}")
    spans = sorted(_spans(request, content))
    end = ALIGNMENT_BYTES
    for start, num_bytes in spans:
        if start % ALIGNMENT_BYTES:
            raise InvalidArgument(f"a vector begins at byte {start}; expected a multiple of {ALIGNMENT_BYTES}")
        if start < end:
            raise InvalidArgument(f"a vector begins at byte {start}, before {end}, where what lies before it ends")
        end = start + num_bytes
    if end > request.segment_bytes:
        raise InvalidArgument(f"a vector ends at byte {end} of a segment of {request.segment_bytes} bytes")
    bytes_max = sum(num_bytes for _, num_bytes in spans) + (len(spans) + 2) * mmap.PAGESIZE
    if request.segment_bytes > bytes_max:
        raise InvalidArgument(
            f"the segment has {request.segment_bytes} bytes; its vectors need {bytes_max} at the most, each beginning "
            "on a page"
        )


def _spans(request: local.LocalAttach, content: Content) -> Iterator[tuple[int, int]]:
    """Yield the start and the size in bytes of each vector that is not empty."""
    sizes = content.own.model.group_sizes
    for vectors in (*request.gradients, request.parameters):
        if len(vectors.offsets) != len(sizes):
            whose = "the model has" if content.own is content.plan else "the worker's parts of the model have"
            raise InvalidArgument(f"Attach names {len(vectors.offsets)} vectors; {whose} {len(sizes)} groups")
        codec = codec_numbered(vectors.codec or FLOAT32)
        codec.require_divisible()
        if codec not in NATIVE:
            raise InvalidArgument(
                f"this server's kernels do not read {codec.name} in shared memory: send it by gRPC or a lane"
            )
        for offset, size in zip(vectors.offsets, sizes, strict=True):
            if size:
                yield offset, codec.max_bytes(size)


def _vectors(vectors: local.LocalVectors, memory: Segment, content: Content) -> Vectors:
    codec = codec_numbered(vectors.codec or FLOAT32)
    shards = {
        shard.shard_id: memory.view(
            vectors.offsets[shard.group] + codec.max_bytes(shard.offset), codec.max_bytes(shard.length)
        )
        for shard in content.own.of_server(content.server_index)
    }
    return Vectors(codec, shards)
