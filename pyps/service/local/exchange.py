"""A push, or a push and a pull in one, whose numbers lie in the worker's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyps.core.finding import FINITE, Finding, first_of
from pyps.core.gradient import Gradient, item_bytes, require_few_extents
from pyps.core.receipt import Receipt
from pyps.core.reply import Reply, brings_parameters
from pyps.core.shard import Shard
from pyps.run.run import Run
from pyps.service import convert
from pyps.service.local.attachment import Attachment, Vectors
from pyps.service.local.segment import Segment
from pyps_wire import common_pb2 as common
from pyps_wire import local_pb2 as local
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.errors import BadRequest, WrongSize

# What lies in many places takes longer than its bytes do together: about so many more for each place.
EXTENT_BYTES = 4096


class SegmentAnswer:
    """Sends a shard's parameters to their place in the worker's memory, where they are newer than what it holds.

    Where the memory is attached no longer, the push is left undone: by now the worker may write the next gradient.
    """

    __slots__ = ("_held_version", "_reply", "_segment", "version")

    def __init__(self, segment: Segment | None, reply: Reply | None, *, held_version: int | None):
        """Without a segment the push is made in any case; without a reply it brings nothing."""
        self._segment = segment
        self._reply = reply
        self._held_version = held_version
        # The version that was written, None where none was.
        self.version: int | None = None

    def place(self, receipt: Receipt, version: int) -> Reply | None:
        """Chooses whether to bring parameters, and notes their version; ServerUnavailable after the link's end."""
        if self._segment is not None:
            self._segment.require_open()
        if self._reply is None or not brings_parameters(receipt, version=version, held_version=self._held_version):
            return None
        self.version = version
        return self._reply


@dataclass(slots=True)
class Part:
    """One shard of an exchange, from its request to its receipt."""

    request: wire.PushRequest
    shard: Shard
    numbers: Vectors
    answer: SegmentAnswer
    gradient: Gradient | None = None
    finding: Finding = FINITE
    receipt: Receipt | None = None


class Exchange:
    """One request of a worker. All its parts are looked through before any is applied.

    `scan` is called for every part, from any threads; then `push` for every part, or `push_whole` once.
    """

    def __init__(self, run: Run, attachment: Attachment, request: local.LocalExchange):
        """Refuses what names other vectors, shards or workers than those attached, before a number is read."""
        self._run = run
        self._attachment = attachment
        # Whether all parts are to be handled as one.
        self.is_whole = run.whole is not None
        attachment.require_shards(run.shards)
        if not request.gradients < len(attachment.gradients):
            raise BadRequest(
                f"the exchange names gradients {request.gradients}; {len(attachment.gradients)} were attached, from 0"
            )
        numbers = attachment.gradients[request.gradients]
        self.parts: list[Part] = []
        for part in request.shards:
            self.parts.append(self._part(part, numbers, pull=request.pull))
        # What was found in all parts together, once it is asked for.
        self._found: Finding | None = None
        self._require_one_push()
        require_few_extents(sum(len(part.request.extents) for part in self.parts))

    def _part(self, request: wire.PushRequest, numbers: Vectors, *, pull: bool) -> Part:
        attachment = self._attachment
        if request.HasField("sender"):
            attachment.require_sender(request.sender)
        shard = attachment.shard(request.shard_id)
        attachment.require_laid_out(request.shard_id, self._run.membership)
        if request.codec not in (0, numbers.codec):
            raise BadRequest(f"the push names codec {request.codec}; its vectors were attached with {numbers.codec}")
        # A push that is one for all shards is made or left with the first.
        segment = None if self.is_whole and self.parts else attachment.segment
        if not pull:
            return Part(request, shard, numbers, SegmentAnswer(segment, None, held_version=None))
        if request.reply_codec not in (0, attachment.codec):
            raise BadRequest(
                f"the exchange wants codec {request.reply_codec}; its parameters were attached with {attachment.codec}"
            )
        # Versions of another epoch mean nothing here.
        holds = request.HasField("held_version") and request.epoch == attachment.content.epoch
        held_version = request.held_version if holds else None
        reply = attachment.replies[request.shard_id]
        return Part(request, shard, numbers, SegmentAnswer(segment, reply, held_version=held_version))

    def _require_one_push(self) -> None:
        if not self.parts:
            raise BadRequest("the exchange names no shard: name those whose gradients lie in the segment")
        first = self.parts[0].request
        # One part alone is the small model's, whose rounds are many.
        if len(self.parts) > 1 and len({part.shard.shard_id for part in self.parts}) < len(self.parts):
            raise BadRequest("the exchange names a shard twice: name each once")
        if len(self.parts) > 1 and any(part.request.sequence != first.sequence for part in self.parts):
            raise BadRequest("the exchange holds parts of several pushes: give all its shards one sequence")
        if self.is_whole and len(self.parts) != first.num_shards:
            raise BadRequest(
                f"the exchange holds {len(self.parts)} of the push's {first.num_shards} shards: under one mutex for the"
                " model it has to hold all of them, and num_shards has to say how many"
            )

    @property
    def work_bytes(self) -> int:
        """The bytes of parameters that would take as long, at most."""
        return sum(4 * part.shard.length + EXTENT_BYTES * len(part.request.extents) for part in self.parts)

    @property
    def copied_bytes(self) -> int:
        """The bytes that are copied, as they do not lie together."""
        return sum(
            item_bytes(part.numbers.codec) * sum(extent.length for extent in part.request.extents)
            for part in self.parts
        )

    def scan(self, part: Part) -> None:
        """Looks through a part's numbers; raises as `Run.scan`, and has changed nothing."""
        part.gradient = self._gradient(part)
        part.finding = self._run.scan(part.gradient, part.shard.shard_id, run_id=self._attachment.content.run_id)

    def push(self, part: Part) -> None:
        """Handles a part; where any of them holds NaN or infinity, it is refused."""
        assert part.gradient is not None, "a part is looked through before it is pushed"
        part.receipt = self._run.push(
            part.gradient,
            part.shard.shard_id,
            run_id=self._attachment.content.run_id,
            answer=part.answer,
            finding=self._finding,
        )

    def push_whole(self) -> None:
        """Handles all parts as one, under the model's mutex."""
        gradients = [(part.shard.shard_id, part.gradient) for part in self.parts if part.gradient is not None]
        receipts = self._run.push_whole(
            gradients,
            run_id=self._attachment.content.run_id,
            answers={part.shard.shard_id: part.answer for part in self.parts},
            finding=self._finding,
        )
        for part, receipt in zip(self.parts, receipts, strict=True):
            part.receipt = receipt

    def reply(self) -> local.LocalReply:
        """What the worker is told, once every part has its receipt."""
        reply = local.LocalReply()
        for part in self.parts:
            assert part.receipt is not None, "every part is pushed before the worker is answered"
            answered = reply.exchanged.replies.add(receipt=convert.receipt_of(part.receipt, self._run))
            if part.answer.version is not None:
                answered.version = part.answer.version
                answered.epoch = part.receipt.epoch
                answered.codec = int(self._attachment.codec)  # type: ignore[assignment]
        return reply

    @property
    def _finding(self) -> Finding:
        if self._found is None:
            self._found = first_of(part.finding for part in self.parts)
        return self._found

    def _gradient(self, part: Part) -> Gradient:
        request = part.request
        numbers = part.numbers.shards[request.shard_id]
        payload: bytes | memoryview = numbers
        if request.kind == common.PAYLOAD_KIND_NOTHING:
            payload = b""
        elif request.extents:
            payload = _together(numbers, request.extents, size_of_one=item_bytes(part.numbers.codec), shard=part.shard)
        return convert.gradient_of(
            request,
            payload,
            worker_id=self._attachment.worker_id,
            incarnation=self._attachment.incarnation,
            codec=part.numbers.codec,
            volatile=isinstance(payload, memoryview),
        )


def _together(numbers: memoryview, extents: Sequence[common.Extent], *, size_of_one: int, shard: Shard) -> bytes:
    """The extents' numbers, one behind the other; the gradient's own check looks at the extents more closely."""
    if sum(extent.length for extent in extents) > shard.length:
        raise WrongSize(f"the extents are longer than shard {shard.shard_id}, which has {shard.length} parameters")
    return b"".join(
        numbers[extent.offset * size_of_one : (extent.offset + extent.length) * size_of_one] for extent in extents
    )
