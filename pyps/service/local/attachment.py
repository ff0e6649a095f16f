"""What a worker has attached: its memory, laid out as the run's model is cut into shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from mmap import PAGESIZE
from typing import NamedTuple

from pyps.core.gradient import Codec, item_bytes
from pyps.core.membership import Membership
from pyps.core.plan import Reply
from pyps.core.shard import Shard
from pyps.service import convert
from pyps.service.local.segment import Segment
from pyps_wire import common_pb2 as common
from pyps_wire import local_pb2 as local
from pyps_wire.contract import GRADIENT_BUFFERS_MAX
from pyps_wire.errors import BadRequest, NotInitialized
from pyps_wire.partition import Partition

ALIGNMENT_BYTES = 64


class Vectors(NamedTuple):
    """Numbers of one codec in the worker's memory, by shard."""

    codec: Codec
    shards: Mapping[int, memoryview]


class Content(NamedTuple):
    """The run's shards on this server, as they were when the memory was attached."""

    run_id: str
    epoch: int
    plan: Partition
    # Of the parts of the model that the worker holds: the plan itself where that is all of it.
    own: Partition
    server_index: int
    shards: Mapping[int, Shard]


@dataclass(frozen=True)
class Attachment:
    """A worker's memory and the shards that it was laid out for."""

    worker_id: str
    incarnation: int
    content: Content
    segment: Segment
    gradients: Sequence[Vectors]
    codec: Codec
    # Where each shard's parameters go.
    replies: Mapping[int, Reply]

    @classmethod
    def make(cls, request: local.LocalAttach, segment: Segment, content: Content) -> Attachment:
        """Lays out a segment whose request has passed `check_layout`."""
        parameters = _vectors(request.parameters, segment, content)
        return cls(
            request.sender.worker_id,
            request.sender.incarnation,
            content,
            segment,
            [_vectors(vectors, segment, content) for vectors in request.gradients],
            parameters.codec,
            {shard_id: Reply(view, 0, parameters.codec) for shard_id, view in parameters.shards.items()},
        )

    def shard(self, shard_id: int) -> Shard:
        """The shard of that number; BadRequest when it is not on this server."""
        content = self.content
        shard = content.shards.get(shard_id)
        if shard is None:
            raise BadRequest(
                f"shard {shard_id} is not on server {content.server_index}, which holds {len(content.shards)} of the "
                f"model's {content.plan.num_shards}"
            )
        return shard

    def require_laid_out(self, shard_id: int, membership: Membership) -> None:
        """Refuses a shard that has no place in the memory: it is of a part that the worker does not declare."""
        if shard_id in self.replies:
            return
        membership.require_part(self.worker_id, shard_id, self.content.plan.part_of(shard_id))
        raise NotInitialized("the worker declares other parts since this memory was attached: attach it anew")

    def require_sender(self, sender: common.Sender) -> None:
        """Refuses whoever speaks for another worker than the one that attached; to say nothing is enough."""
        worker_id, incarnation = sender.worker_id or self.worker_id, sender.incarnation or self.incarnation
        run_id = sender.run_id or self.content.run_id
        if (worker_id, incarnation, run_id) != (self.worker_id, self.incarnation, self.content.run_id):
            raise BadRequest(
                f"the request is of worker {worker_id!r} ({incarnation}) of run {run_id!r}, on a connection of worker "
                f"{self.worker_id!r} ({self.incarnation}) of run {self.content.run_id!r}"
            )

    def require_shards(self, shards: Mapping[int, Shard]) -> None:
        """Refuses to serve other shards than the memory was laid out for: those that the run has now."""
        if shards is not self.content.shards:
            raise NotInitialized("the run was reset since this memory was attached: say Hello, then attach it anew")


def check_layout(request: local.LocalAttach, content: Content) -> None:
    """Refuses vectors that lie beside the segment or in each other, and a segment larger than they need."""
    if not 1 <= len(request.gradients) <= GRADIENT_BUFFERS_MAX:
        count = len(request.gradients)
        raise BadRequest(f"Attach names {count} sets of gradients; expected 1 to {GRADIENT_BUFFERS_MAX}")
    spans = sorted(_spans(request, content))
    end = ALIGNMENT_BYTES
    for start, num_bytes in spans:
        if start % ALIGNMENT_BYTES:
            raise BadRequest(f"a vector begins at byte {start}; expected a multiple of {ALIGNMENT_BYTES}")
        if start < end:
            raise BadRequest(f"a vector begins at byte {start}, before {end}, where what lies before it ends")
        end = start + num_bytes
    if end > request.segment_bytes:
        raise BadRequest(f"a vector ends at byte {end} of a segment of {request.segment_bytes} bytes")
    bytes_max = sum(num_bytes for _, num_bytes in spans) + (len(spans) + 2) * PAGESIZE
    if request.segment_bytes > bytes_max:
        raise BadRequest(
            f"the segment has {request.segment_bytes} bytes; its vectors need {bytes_max} at the most, each beginning "
            "on a page"
        )


def _spans(request: local.LocalAttach, content: Content) -> Iterator[tuple[int, int]]:
    """Yields where each vector that is not empty begins and how many bytes it has."""
    sizes = content.own.model.group_sizes
    for vectors in (*request.gradients, request.parameters):
        if len(vectors.offsets) != len(sizes):
            whose = "the model has" if content.own is content.plan else "the worker's parts of the model have"
            raise BadRequest(f"Attach names {len(vectors.offsets)} vectors; {whose} {len(sizes)} groups")
        size_of_one = item_bytes(convert.codec_from(vectors.codec))
        for offset, size in zip(vectors.offsets, sizes, strict=True):
            if size:
                yield offset, size * size_of_one


def _vectors(vectors: local.LocalVectors, segment: Segment, content: Content) -> Vectors:
    codec = convert.codec_from(vectors.codec)
    size_of_one = item_bytes(codec)
    shards = {
        shard.shard_id: segment.view(
            vectors.offsets[shard.group] + shard.offset * size_of_one, shard.length * size_of_one
        )
        for shard in content.own.of_server(content.server_index)
    }
    return Vectors(codec, shards)
