"""A worker's pushes to all servers: described, numbered, checked, and sent a message a shard."""

from __future__ import annotations

import math
import threading
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import chain, count
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from pyps_client.early_shards import EarlyShards
from pyps_client.kept import KeptPushes
from pyps_client.leave import keep_large_blocks
from pyps_client.pull import LARGE_BYTES, Holdings, Receiver, Versions
from pyps_client.replica.group import ALONE, Group
from pyps_client.retry import LinkLost
from pyps_client.run_state import View
from pyps_client.transport import Incoming, Parts, Payload
from pyps_client.transport.connection import Connection, call_seconds
from pyps_client.transport.grpc import GrpcChannel
from pyps_client.vectors import (
    Encoder,
    Extents,
    Vectors,
    check_vectors,
    codec_for,
    dtype_of,
    first_non_finite,
    part_of,
    values_at,
)
from pyps_wire.codecs import FLOAT32, Codec
from pyps_wire.common_pb2 import (
    OUTCOME_HELD,
    OUTCOME_NOT_HELD,
    OUTCOME_REJECTED,
    PAYLOAD_KIND_GRADIENT,
    PAYLOAD_KIND_NOTHING,
    Extent,
    Receipt,
    Sender,
)
from pyps_wire.errors import InvalidArgument, WrongSize
from pyps_wire.local_pb2 import LocalRequest
from pyps_wire.parameter_server_pb2 import PushRequest
from pyps_wire.partition import Partition, ShardRange

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")
# A shard and the pushed ranges of it; None where nothing is pushed.
Part = tuple[ShardRange, Extents | None]

# A round of at most so many bytes needs no second thread: a connection buffers them in each direction.
SMALL_BYTES = 1 << 17


class GroupRate(NamedTuple):
    """The rate of a parameter group, and its momentum; None keeps the servers'."""

    learning_rate: float
    momentum: float | None = None
    # From a worker that does not own the schedule: it applies only while nobody owns it.
    provisional: bool = False


_NO_RATES: Mapping[int, GroupRate] = MappingProxyType({})


@dataclass(slots=True)
class Plan:
    """One push of a worker, and where newer parameters go. Its vectors must not change until the exchange returns."""

    # One vector a group: float32, or of the codec's type (float16, or uint16 with the bits of bfloat16).
    gradients: Vectors
    # Where newer parameters are written, one vector a group, as for a pull; None for a push alone.
    parameters: Vectors | None = None
    # One flag a tensor, in the model's order: absent tensors are not sent. None for all.
    present: Sequence[bool] | None = None
    example_count: int = 0
    minibatch_count: int = 1
    # `held_versions` of the parameters that the oldest summed gradient was computed on (None: those held now), and the
    # newest (None: as the oldest).
    base_versions: Mapping[int, int] | None = None
    newest_base_versions: Mapping[int, int] | None = None
    # A PayloadKind a group, gradients by default.
    kinds: Sequence[int] | None = None
    # New rates and momenta by group.
    learning_rates: Mapping[int, GroupRate] | None = None
    # The result of `Worker.norm`, or 0, on a thread that must make no collective calls: `meet` follows then. None:
    # computed where servers clip.
    gradient_norm: float | None = None
    # The worker's count of steps; None for the present one.
    clock: int | None = None
    # The index of these among the lent gradients, if the caller knows it and the parameters are lent too.
    lent_index: int | None = None
    # Where the worker's data stands once this push is applied, for whoever takes its place: at most 64 KiB.
    data_position: bytes = b""
    # Sends shards in messages while gradients of others are computed. It brings the norm and a scale, at its end.
    early: EarlyShards | None = None


class LearningRates:
    """The rates that this worker set, by parameter group, and the servers that have them. For the thread that pushes.

    A server that refused a push, or was restored, may have an old rate: the next push sends the new one again.
    """

    def __init__(self, num_servers: int, *, num_groups: int) -> None:
        self._num_groups = num_groups
        # Replaced by each change, never changed.
        self.rates = _NO_RATES
        self._provisional = _NO_RATES
        # For each server the epoch and the rates of its newest push.
        self._taken: list[tuple[int, Mapping[int, GroupRate]]] = [(-1, _NO_RATES)] * num_servers

    def change(self, rates: Mapping[int, GroupRate]) -> None:
        changed = dict(self.rates)
        for group, (rate, momentum, provisional) in rates.items():
            if not 0 <= group < self._num_groups:
                raise InvalidArgument(
                    f"learning_rates names parameter group {group}; expected 0 to {self._num_groups - 1}."
                )
            if not 0 <= rate < float("inf"):
                raise InvalidArgument(f"The learning rate of group {group} is {rate!r}; expected a number, 0 or more.")
            changed[group] = GroupRate(float(rate), momentum, provisional)
        if changed != self.rates:
            self.rates = changed
            self._provisional = {group: rate for group, rate in changed.items() if rate.provisional}

    def owed(self, server_index: int, *, epoch: int) -> Mapping[int, GroupRate]:
        """Return the rates that the server's next push must carry: always provisional ones, which others change."""
        taken_in, taken = self._taken[server_index]
        return self._provisional if taken_in == epoch and taken is self.rates else self.rates

    def answered(self, server_index: int, *, epoch: int, receipts: Sequence[Receipt]) -> None:
        """Note the receipts of a push of that epoch, which carried all owed rates."""
        if any(receipt.outcome == OUTCOME_REJECTED for receipt in receipts):
            return
        self._taken[server_index] = (epoch, self.rates)


class Pushes:
    """Numbers and checks pushes, and slices them for the servers. For one thread at a time."""

    def __init__(
        self,
        holdings: Holdings,
        *,
        sender: Sender,
        encoder: Encoder,
        connections: Sequence[Connection],
        view: View,
        kept: Mapping[int, KeptPushes],
        peers: Group = ALONE,
    ) -> None:
        self._partition = partition = holdings.partition
        self._num_shards, self._num_groups = partition.num_shards, partition.model.num_groups
        self._sender = sender
        self._encoder = encoder
        self._codec = encoder.codec
        self._connections = connections
        self._view = view
        self._kept = kept
        self._peers = peers
        self._holdings = holdings
        self._rates = LearningRates(partition.num_servers, num_groups=self._num_groups)
        self._gradients_only = [PAYLOAD_KIND_GRADIENT] * self._num_groups
        # The place of the server that keeps the worker's data position: of a replica, the leader's.
        holders = (place for place, each in enumerate(connections) if partition.of_server(each.index))
        self._keeper = next(holders, -1) if peers.index == 0 else -1
        # For each server the newest template and its settings: most pushes repeat the settings of the one before.
        self._templates: list[tuple[object, Template] | None] = [None] * len(connections)
        self._sequences = count(1)

    def next_sequence(self) -> int:
        """Return the number of the next push."""
        return next(self._sequences)

    def outgoing(
        self,
        plan: Plan,
        *,
        clock: int,
        clip_norm: float,
        receivers: Sequence[Receiver] | None = None,
        lent_index: int | None = None,
    ) -> list[Outgoing]:
        """Return the push for each server; with receivers, one a server, an exchange.

        `lent_index`: the index of the lent gradients, if the receivers' vectors are lent too. `clip_norm`: 0 unless
        servers clip, in which case a missing norm is computed, over all processes of the replica.
        """
        vectors, kinds, present = plan.gradients, plan.kinds or self._gradients_only, plan.present
        partition = self._partition
        if lent_index is None:
            dtype = dtype_of(self._codec, converted=bool(vectors) and vectors[0].dtype == np.float32)
            check_vectors(vectors, partition.model, dtype, what="pushed gradient")
        if present is not None and len(present) != len(partition.model.tensors):
            raise WrongSize(
                f"present has {len(present)} flags; expected one for each of {len(partition.model.tensors)} tensors."
            )
        if len(kinds) != self._num_groups:
            raise WrongSize(f"kinds has {len(kinds)} entries; expected one for each of {self._num_groups} groups.")
        if plan.learning_rates:
            self._rates.change(plan.learning_rates)
        base = self._holdings.versions if plan.base_versions is None else plan.base_versions
        newest = base if plan.newest_base_versions is None else plan.newest_base_versions
        if base is not newest or len(base) != self._num_shards or min(base.values()) < 0:
            for shard in partition.shards:
                if min(base.get(shard.shard_id, -1), newest.get(shard.shard_id, -1)) < 0:
                    raise InvalidArgument(
                        f"A push needs parameters pulled before: no version of shard {shard.shard_id} is held."
                    )
        epochs = base.epochs if isinstance(base, Versions) else self._holdings.versions.epochs
        sequence = next(self._sequences)
        if self._codec.dtype is None:
            self._begin(plan)
        norm = plan.gradient_norm
        if norm is None and clip_norm > 0 and plan.early is None:
            norm = self.norm(plan)
        pushes: list[Outgoing] = []
        for place, connection in enumerate(self._connections):
            epoch = epochs[connection.index]
            rates = self._rates.owed(connection.index, epoch=epoch) if self._rates.rates else _NO_RATES
            template = self._template(place, plan, kinds, receivers)
            pushes.append(
                Outgoing(
                    *(template, plan, sequence),
                    epoch=epoch,
                    clock=clock,
                    gradient_norm=norm or 0.0,
                    base_versions=base,
                    newest_base_versions=newest,
                    learning_rates=rates,
                    all_rates=self._rates.rates,
                    connection=connection,
                    kept=self._kept.get(connection.index),
                    receiver=None if receivers is None else receivers[place],
                    lent_index=lent_index,
                    encoder=self._encoder,
                    waiting=template.waiting.copy(),
                    data_position=plan.data_position if place == self._keeper else b"",
                )
            )
        return pushes

    def answered(self, pushes: Iterable[Outgoing]) -> None:
        if self._rates.rates:
            for push in pushes:
                # Else its early shards were abandoned.
                if not push.waiting:
                    self._rates.answered(push.connection.index, epoch=push.epoch, receipts=push.receipts)

    def norm(self, plan: Plan) -> float:
        """Return the norm of a push over all processes of the replica, all of which call this."""
        self._begin(plan)
        kinds = plan.kinds or self._gradients_only
        parts = chain.from_iterable(
            pushed_parts(
                self._partition, connection.index, self._holdings.settled(connection.index), present=plan.present
            )
            for connection in self._connections
        )
        own = norm_of(parts, plan.gradients, kinds=kinds, encoder=self._encoder)
        if self._peers.count == 1:
            return own
        return math.sqrt(self._peers.all_reduce([own * own])[0])

    def _begin(self, plan: Plan) -> None:
        """Let the encoder know the push, and clear what it has kept for too long."""
        held = plan.early is not None and plan.early.held
        if not self._encoder.begin(plan, plan.kinds, held=held) or not self._codec.stateful:
            return
        versions = plan.newest_base_versions or plan.base_versions or self._holdings.versions
        epochs = versions.epochs if isinstance(versions, Versions) else self._holdings.versions.epochs
        server_of, state = self._partition.server_of, self._view.state
        num_workers = max(1, state.num_workers)
        gradients_per_update = max(1, num_workers // (state.terms.updates_per_round or num_workers))
        self._encoder.clear_old(
            lambda shard_id: (epochs[server_of(shard_id)], versions.get(shard_id, -1)),
            # Two rounds, of a gradient from each worker.
            age_max=math.ceil(2 * num_workers / gradients_per_update),
        )

    def _template(self, place: int, plan: Plan, kinds: Sequence[int], receivers: Sequence[Receiver] | None) -> Template:
        index = self._connections[place].index
        # Which gradients of an early shard are present is known when it is sent.
        present = None if plan.early is not None else plan.present
        settled = self._holdings.settled(index) if self._holdings.late else ()
        flags = None if present is None or all(present) else tuple(present)
        reply_codec = None if receivers is None else receivers[place].codec
        made_of = (flags, settled, tuple(kinds), reply_codec)
        known = self._templates[place]
        if known is not None and known[0] == made_of:
            return known[1]
        parts = pushed_parts(self._partition, index, settled, present=present)
        template = Template(parts, sender=self._sender, codec=self._codec, kinds=kinds, reply_codec=reply_codec)
        self._templates[place] = made_of, template
        return template


@dataclass(eq=False)
class Template:
    """The messages to one server, one a shard, made once and filled again by each push."""

    parts: Sequence[Part]
    _: KW_ONLY
    sender: Sender
    codec: Codec
    # A PayloadKind a parameter group.
    kinds: Sequence[int]
    # The codec of parameters, in an exchange.
    reply_codec: Codec | None = None

    def __post_init__(self) -> None:
        parts, codec, reply_codec = self.parts, self.codec, self.reply_codec
        self.waiting = {shard.shard_id: (shard, extents) for shard, extents in parts}
        # Index of lent gradients -> their shards' payloads, which are views of them.
        self.payloads: dict[int, list[memoryview]] = {}
        # All messages in one, for shared memory.
        self.request = LocalRequest()
        self.request.exchange.pull = reply_codec is not None
        for shard, extents in parts:
            message = self.request.exchange.shards.add(
                sender=self.sender,
                codec=codec_for(codec, self.kinds[shard.group]),
                shard_id=shard.shard_id,
                num_shards=len(parts),
            )
            # A shard without gradients is pushed too: a round waits for every worker.
            message.kind = PAYLOAD_KIND_NOTHING if extents is None else self.kinds[shard.group]  # type: ignore[assignment]
            message.extents.extend(Extent(offset=start, length=length) for start, length in extents or ())
            if reply_codec is not None:
                message.reply_codec = reply_codec  # type: ignore[assignment]
        self.messages = list(self.request.exchange.shards)
        self.message_of = dict(zip(self.waiting, self.messages, strict=True))
        # The payloads of both directions.
        length = sum(shard.length for shard, _ in parts)
        pushed = sum(codec_for(codec, self.kinds[shard.group]).max_bytes(shard.length) for shard, _ in parts)
        self.num_bytes = pushed
        if reply_codec is not None:
            self.num_bytes += (FLOAT32 if reply_codec.published else reply_codec).max_bytes(length)
        self.timeout_seconds = call_seconds(self.num_bytes)
        if self.num_bytes > LARGE_BYTES:
            keep_large_blocks()


@dataclass(slots=True, eq=False)
class Outgoing:
    """One push, or exchange with a receiver, with one server; after a loss it resends shards without a receipt."""

    template: Template
    plan: Plan
    sequence: int
    _: KW_ONLY
    # Values that the plan leaves open, and the learning rates that this server must take.
    base_versions: Mapping[int, int]
    newest_base_versions: Mapping[int, int]
    learning_rates: Mapping[int, GroupRate]
    # Those for a server that came back.
    all_rates: Mapping[int, GroupRate] | None = None
    epoch: int = 0
    clock: int = 0
    gradient_norm: float = 0.0
    connection: Connection
    # Of a server to which pushes are sent again when it comes back.
    kept: KeptPushes | None = None
    # Whether it came back since the gradient's parameters were pulled.
    is_resent: bool = field(init=False, default=False)
    # The messages that are sent: of the template, or as many as go again; or each early one, by its shard.
    messages: dict[int, PushRequest] = field(init=False, default_factory=dict)
    receiver: Receiver | None = None
    # The index of the lent gradients, if the receiver's vectors are lent too.
    lent_index: int | None = None
    encoder: Encoder
    receipts: list[Receipt] = field(init=False, default_factory=list)
    # The largest version of received parameters.
    version: int = field(init=False, default=0)
    # The shards without a receipt.
    waiting: dict[int, Part]
    data_position: bytes = b""

    def __call__(self, channel: GrpcChannel, stop: threading.Event) -> list[Receipt]:
        if not self.waiting:
            return self.receipts
        answered = len(self.receipts)
        try:
            if self.kept is not None and self.kept.epoch != self.epoch:
                self._enter_epoch(self.kept, channel, stop)
            if self.plan.early is not None:
                self._send_early(channel, self.plan.early)
                return self.receipts
            template = self.template if answered == 0 else replace(self.template, parts=list(self.waiting.values()))
            self._fill(template)
            self.messages = template.message_of
            request = None
            if self.lent_index is not None:
                request = template.request
                request.exchange.gradients = self.lent_index
            parts = Parts(
                self._messages(template),
                template.timeout_seconds,
                are_small=template.num_bytes <= SMALL_BYTES,
                request=request,
            )
            method = "Push" if self.receiver is None else "Exchange"
            self.connection.round(channel, method, parts, self._take)
        except LinkLost as lost:
            lost.answered = len(self.receipts) - answered
            raise
        if self.waiting:
            answered = len(self.receipts) - answered
            raise LinkLost(f"{len(self.waiting)} shards were left without a receipt", answered=answered)
        return self.receipts

    def _enter_epoch(self, kept: KeptPushes, channel: GrpcChannel, stop: threading.Event) -> None:
        """Let the push be one to a server that came back, which has all earlier ones again."""
        kept.await_rounds(channel, stop, self.waiting, epoch=kept.epoch)
        self.epoch, self.is_resent = kept.epoch, True
        self.learning_rates = self.all_rates or self.learning_rates
        # Later pushes fill the other messages.
        self.template = replace(self.template)

    def _send_early(self, channel: GrpcChannel, early: EarlyShards) -> None:
        """Send shards as they become complete; after a loss what the server had held goes again."""
        self._fill(self.template)
        held: set[int] = set()
        if early.held:
            self._early_rounds(channel, early, self.waiting.copy(), held, to_hold=True)
        self._early_rounds(channel, early, self.waiting, held)

    def _early_rounds(
        self,
        channel: GrpcChannel,
        early: EarlyShards,
        waiting: dict[int, Part],
        held: set[int],
        *,
        to_hold: bool = False,
    ) -> None:
        """Send shards of `waiting` in rounds until all are answered: no deadline runs in between.

        `to_hold`: until the push is sealed; those that the server holds then are added to `held`.
        """
        while waiting:
            under_way = set() if to_hold else set(held)
            following = partial(self._early_message, early, waiting, under_way, held, to_hold=to_hold)
            first = following(begins=True)
            if first is None:
                return

            def take(reply: Any, payload: Payload, under_way: set[int] = under_way) -> bool:
                receipt = reply.receipt
                if receipt.outcome in (OUTCOME_HELD, OUTCOME_NOT_HELD):
                    waiting.pop(receipt.shard_id, None)
                    if receipt.outcome == OUTCOME_HELD:
                        held.add(receipt.shard_id)
                else:
                    self._take(reply, payload)
                return early.answered(under_way, waiting)

            lost = partial(early.lost, under_way)
            parts = Parts(chain([first], iter(following, None)), self.template.timeout_seconds, abandon=lost)
            try:
                self.connection.round(channel, "Exchange", parts, take)
            finally:
                lost()

    def _early_message(
        self,
        early: EarlyShards,
        waiting: Mapping[int, Part],
        under_way: set[int],
        held: set[int],
        *,
        to_hold: bool,
        begins: bool = False,
    ) -> tuple[PushRequest, Buffer] | None:
        """Return the next message that may be sent; None where there is none in this round."""
        shard_id = early.next(waiting, under_way, begins=begins, to_hold=to_hold)
        if shard_id is None:
            return None
        shard, _ = self.template.waiting[shard_id]
        extents = _extents(early.partition, shard, early.present)
        numbers = None if extents is None else values_at(part_of(self.plan.gradients, shard), extents)
        with_numbers = early.send(shard_id, numbers, under_way, begins=begins)
        if with_numbers is None:
            return None
        message = PushRequest()
        message.CopyFrom(self.template.message_of[shard_id])
        if to_hold:
            message.scale_follows = True
        elif early.held:
            message.num_shards = len(self.waiting)
            self.encoder.scale = message.gradient_scale = early.scale
            message.gradient_norm = early.norm
            message.num_held = len(held)
            held.clear()
        self.messages[shard_id] = message
        if numbers is None or not with_numbers:
            message.kind = PAYLOAD_KIND_NOTHING
            return message, b""
        message.extents.extend(Extent(offset=start, length=length) for start, length in extents or ())
        return message, self.encoder.payload(numbers, shard, extents or ())

    def _checked(self, template: Template) -> Template:
        """Return the template, or one that sends a NaN for each shard if a gradient is not finite.

        So the server refuses all shards: it checks each message by itself, and would apply the finite ones.
        """
        parts, vectors = template.parts, self.plan.gradients
        numbers = [values_at(part_of(vectors, shard), extents) for shard, extents in parts if extents is not None]
        if all(first_non_finite(values, template.codec) is None for values in numbers):
            return template
        self.plan = replace(self.plan, gradients=[np.broadcast_to(np.float32(np.nan), v.shape) for v in vectors])
        one_number = [(shard, None if extents is None else ((0, 1),)) for shard, extents in parts]
        template = replace(template, parts=one_number)
        self._fill(template)
        return template

    def _fill(self, template: Template) -> None:
        plan, receiver, rates = self.plan, self.receiver, self.learning_rates
        held = receiver.held.versions if receiver is not None and receiver.held.epoch == self.epoch else None
        for (shard, _), message in zip(template.parts, template.messages, strict=True):
            shard_id = shard.shard_id
            message.sequence = self.sequence
            message.epoch = self.epoch
            message.clock = self.clock
            message.example_count = plan.example_count
            message.minibatch_count = plan.minibatch_count
            message.gradient_norm = self.gradient_norm
            message.base_version = self.base_versions[shard_id]
            message.newest_base_version = self.newest_base_versions[shard_id]
            if self.is_resent and self.kept is not None:
                message.resent_staleness = self.kept.staleness(shard_id)
            if held is not None:
                message.held_version = held[shard_id]
            else:
                message.ClearField("held_version")
            if message.HasField("learning_rate"):
                message.ClearField("learning_rate")
                message.ClearField("momentum")
                message.ClearField("provisional")
            if rates and shard.group in rates:
                message.learning_rate, momentum, message.provisional = rates[shard.group]
                if momentum is not None:
                    message.momentum = momentum
        if template.messages:
            template.messages[0].data_position = self.data_position

    def _messages(self, template: Template) -> Iterator[tuple[PushRequest, Buffer]]:
        """Yield the messages, each made when the transport can send it: two are in memory at a time."""
        if self.lent_index is not None and self.connection.left_unchecked:
            template = self._checked(template)
        payloads = template.payloads.get(self.lent_index) if self.lent_index is not None else None
        if payloads is None:
            payloads = self._payloads_to_keep(template)
        for place, message in enumerate(template.messages):
            if payloads is not None:
                yield message, payloads[place]
                continue
            shard, extents = template.parts[place]
            if extents is None:
                yield message, b""
            else:
                values = values_at(part_of(self.plan.gradients, shard), extents)
                yield message, self.encoder.payload(values, shard, extents)

    def _payloads_to_keep(self, template: Template) -> list[memoryview] | None:
        """Return the payloads of lent vectors, which later pushes send from the same place; None for other vectors."""
        vectors = self.plan.gradients
        if self.lent_index is None or vectors[0].dtype != template.codec.dtype:
            return None
        if any(extents != () for _, extents in template.parts):
            return None
        payloads = [part_of(vectors, shard).view(np.uint8).data for shard, _ in template.parts]
        template.payloads[self.lent_index] = payloads
        return payloads

    def _take(self, reply: Any, payload: Payload) -> bool:
        """Note a receipt, and in an exchange write newer parameters; return whether it was the last receipt."""
        receiver, receipt = self.receiver, reply
        if receiver is not None:
            receipt, held = reply.receipt, receiver.held
            # Parameters of another epoch than the held ones would mix two states of the model: a pull follows.
            if reply.codec and reply.epoch == held.epoch:
                if payload is None or receiver.write(receipt.shard_id, reply, payload):
                    held.versions[receipt.shard_id] = version = reply.version
                    if version > self.version:
                        self.version = version
            elif isinstance(payload, Incoming) and payload.nbytes:
                payload.receive(memoryview(bytearray(payload.nbytes)))
        # Else the receipt answers another push.
        if receipt.sequence == self.sequence and receipt.shard_id in self.waiting:
            if self.kept is not None:
                self._keep(self.kept, receipt)
            del self.waiting[receipt.shard_id]
            if self.template.codec.stateful:
                self.encoder.answered(receipt)
            self.receipts.append(receipt)
        return not self.waiting

    def _keep(self, kept: KeptPushes, receipt: Receipt) -> None:
        """Keep the answered message, with numbers of its own, if the server wants it. Raises as `KeptPushes.note`."""
        message, payload = None, memoryview(b"")
        if kept.keeps and receipt.outcome != OUTCOME_REJECTED:
            message = self.messages[receipt.shard_id]
            if message.kind != PAYLOAD_KIND_NOTHING:
                shard, _ = self.template.waiting[receipt.shard_id]
                extents = tuple((extent.offset, extent.length) for extent in message.extents)
                numbers = values_at(part_of(self.plan.gradients, shard), extents)
                payload = memoryview(self.encoder.payload(numbers, shard, extents))
                if isinstance(numbers, np.ndarray) and np.may_share_memory(np.frombuffer(payload, np.uint8), numbers):
                    payload = np.frombuffer(payload, np.uint8).copy().data
            if self.plan.early is not None and self.plan.early.held:
                # The server holds none of it any more.
                message.gradient_scale, message.gradient_norm = self.plan.early.scale, self.plan.early.norm
                message.scale_follows, message.num_held = False, 0
        kept.note(receipt, epoch=self.epoch, message=message, payload=payload)
        # A receipt of an earlier life is as good.
        receipt.epoch = self.epoch


def pushed_parts(
    partition: Partition, server_index: int, left_out: Container[int] = (), *, present: Sequence[bool] | None
) -> tuple[Part, ...]:
    """Return a server's shards, without those of `left_out`, each with its present ranges."""
    shards = [shard for shard in partition.of_server(server_index) if shard.shard_id not in left_out]
    if present is None or all(present):
        return tuple((shard, ()) for shard in shards)
    return tuple((shard, _extents(partition, shard, present)) for shard in shards)


def norm_of(
    parts: Iterable[Part], vectors: Sequence[npt.NDArray[Any]], *, kinds: Sequence[int], encoder: Encoder
) -> float:
    """Return the Euclidean norm of a push's gradients as encoded, without deltas, summed in float64.

    0 where it is not finite, as an encoding may be of numbers that are: servers refuse those as NOT_FINITE.
    """
    total = 0.0
    for shard, extents in parts:
        if extents is None or kinds[shard.group] != PAYLOAD_KIND_GRADIENT:
            continue
        pushed = values_at(part_of(vectors, shard), extents)
        values = encoder.codec.decode(encoder.payload(pushed, shard, extents), pushed.size).astype(np.float64)
        total += float(values @ values)
    return math.sqrt(total) if math.isfinite(total) else 0.0


def _extents(partition: Partition, shard: ShardRange, present: Sequence[bool]) -> Extents | None:
    """Return the ranges of a shard whose tensors are present, neighbours joined."""
    extents: list[tuple[int, int]] = []
    for piece in partition.pieces(shard.shard_id):
        if not present[piece.tensor_index]:
            continue
        if extents and sum(extents[-1]) == piece.shard_offset:
            extents[-1] = (extents[-1][0], extents[-1][1] + piece.length)
        else:
            extents.append((piece.shard_offset, piece.length))
    if extents == [(0, shard.length)]:
        return ()
    return tuple(extents) or None
