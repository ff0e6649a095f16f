"""Conversion between the core's values and the wire's messages."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from pyps import _kernels
from pyps.core.gradient import (
    Extent,
    Gradient,
    PayloadKind,
    PublishedReply,
    PushPlan,
    Reply,
    SharedMemory,
    require_few_extents,
)
from pyps.core.receipt import Outcome, Receipt
from pyps.core.rule_settings import RuleSettings
from pyps.core.spec import spell_out
from pyps.core.store import Pushed
from pyps.run.handshake import SECRET_BYTES_MIN, Greeting, Opening, RunState
from pyps.run.run import SOFTWARE, Run
from pyps_wire import common_pb2 as common
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.codecs import CODECS, FLOAT32, Codec, codec_numbered
from pyps_wire.contract import FEATURES, PROTOCOL_VERSION
from pyps_wire.errors import InvalidArgument, MalformedFrame
from pyps_wire.framing import PAYLOAD_FIELD
from pyps_wire.partition import Model, Partition

M = TypeVar("M", bound=Message)

# A caller's descriptions of itself are shortened to this length.
TEXT_LENGTH_MAX = 200
# The longest message that lists no tensors, shards or leases: names and a heartbeat's scalars need most.
SMALL_BYTES_MAX = 256 * 2**10
# The longest entry of a list by shards or extents: two or three numbers.
ENTRY_BYTES_MAX = 40
# The longest lease in a list.
LEASE_BYTES_MAX = 11
# Tensors, groups and parts of a model.
TENSORS_MAX = 131_072
# The fields of a message with a model, including those of its tensors and groups and the numbers in lists.
FIELDS_MAX = 16 * TENSORS_MAX
_FEW = {"tensors", "groups", "hyperparameters", "parts", "codecs", "shard_lengths", "placement"}


def _counted(kind: Any) -> Iterator[FieldDescriptor]:
    return (field for field in kind.fields if field.message_type or (field.is_repeated and field.is_packed))


def _tree(kind: Any) -> dict[int, Any]:
    return {field.number: field.message_type and _tree(field.message_type) for field in _counted(kind)}


def _names(kind: Any) -> Iterator[str]:
    for field in _counted(kind):
        yield field.name
        if field.message_type:
            yield from _names(field.message_type)


# The fields that are counted in messages with a model, and their names.
_MODEL_BEARING: dict[type[Message], tuple[dict[int, Any], tuple[str, ...]]] = {
    kind: (_tree(kind.DESCRIPTOR), tuple(_names(kind.DESCRIPTOR)))
    for kind in (wire.HelloRequest, wire.InitializeRequest)
}


def parse(kind: type[M], message: bytes, *, bytes_max: int = SMALL_BYTES_MAX) -> M:
    """Read a message without tensors; MalformedFrame if the bytes are no such message.

    A message longer than it needs to be is refused unread: a list of millions would hold up the event loop, and take a
    hundred times its bytes. A message with a model may be long, and is refused for the lengths of its lists.
    """
    if kind in _MODEL_BEARING:
        _require_few(kind, message)
    elif len(message) > bytes_max:
        raise InvalidArgument(
            f"the {kind.__name__} has {len(message)} bytes beside its payload; expected {bytes_max} at most: "
            "list less in it"
        )
    try:
        return kind.FromString(message)
    except DecodeError:
        raise MalformedFrame(f"the {len(message)} bytes received are no valid {kind.__name__} message") from None


def _require_few(kind: type[Message], message: bytes) -> None:
    tree, names = _MODEL_BEARING[kind]
    try:
        num_fields, counts = _kernels.count_fields(message, tree)
    except ValueError:
        raise MalformedFrame(f"the {len(message)} bytes received are no valid {kind.__name__} message") from None
    for name, count in zip(names, counts, strict=True):
        if name in _FEW and count > TENSORS_MAX:
            raise InvalidArgument(f"the {kind.__name__} lists {count} {name}; expected {TENSORS_MAX} at most")
    if num_fields > FIELDS_MAX:
        raise InvalidArgument(
            f"the {kind.__name__} has {num_fields} fields; expected {FIELDS_MAX} at most: list less in it"
        )


def parse_frame(kind: type[M], message: bytes, *, bytes_max: int = SMALL_BYTES_MAX) -> tuple[M, memoryview]:
    """Return the fields of a message, which are at most `bytes_max` long, and its payload in place."""
    try:
        header, offset, length = _kernels.split_frame(message, PAYLOAD_FIELD)
    except ValueError as error:
        raise MalformedFrame(
            f"the {len(message)} bytes received are no valid {kind.__name__} message: {error}"
        ) from None
    return parse(kind, header, bytes_max=bytes_max), memoryview(message)[offset : offset + length]


def greeting_from(request: wire.HelloRequest, known: Model | None = None) -> Greeting:
    """Return Hello's request as a value; `known` is the run's model, which most callers send."""
    observer = request.role == common.ROLE_OBSERVER
    # A caller of another protocol version is refused unread: its other fields may have another meaning.
    readable = request.protocol_version == PROTOCOL_VERSION
    model = None
    if readable and request.HasField("model"):
        is_known = known is not None and request.model.SerializeToString(deterministic=True) == known.spec
        model = known if is_known else Model.from_proto(request.model)
    gradient_codec = parameter_codec = None
    if readable and request.gradient_codec:
        gradient_codec = codec_numbered(request.gradient_codec, what="the worker's gradient_codec")
    if readable and request.parameter_codec:
        parameter_codec = codec_numbered(request.parameter_codec, Codec.pulls, what="the worker's parameter_codec")
    has_optimizer = readable and request.HasField("optimizer") and not observer
    return Greeting(
        run_id=request.sender.run_id,
        worker_id=request.sender.worker_id,
        incarnation=request.sender.incarnation,
        protocol_version=request.protocol_version,
        software=for_people(request.software),
        observer=observer,
        server_index=request.server_index,
        num_servers=request.num_servers,
        model=model,
        optimizer=settings_from(request.optimizer) if has_optimizer else None,
        fingerprint=request.fingerprint,
        host=for_people(request.host),
        process_id=request.process_id,
        device=for_people(request.device),
        gradient_codec=gradient_codec,
        parameter_codec=parameter_codec,
        parts=tuple(request.parts),
        replica=request.replica,
        secret=b"" if observer else request.sender.secret or secrets.token_bytes(SECRET_BYTES_MIN),
        yields=request.yields,
        index=request.worker_index if request.HasField("worker_index") else None,
    )


def opening_from(request: wire.InitializeRequest) -> Opening:
    """Return the first message of Initialize as a value."""
    if not (request.HasField("model") and request.shard_lengths):
        raise InvalidArgument(
            "the first message of Initialize must name the model, shard_lengths and placement: send it before the rest"
        )
    return Opening(
        run_id=request.sender.run_id,
        worker_id=request.sender.worker_id,
        incarnation=request.sender.incarnation,
        term=request.term,
        partition=Partition.of_tables(
            Model.from_proto(request.model),
            request.shard_lengths,
            servers=request.placement,
            num_servers=request.num_servers,
        ),
        optimizer=settings_from(request.optimizer) if request.HasField("optimizer") else None,
        server_index=request.server_index,
        replica=request.replica,
        secret=request.sender.secret,
    )


# Room for a push's fields around its payload, extents aside.
SPARE_BYTES = 4096


def plan_from(
    request: wire.PushRequest,
    payload: memoryview,
    reply: Reply | PublishedReply | None = None,
    *,
    epoch: int = 0,
) -> PushPlan:
    """Return a push to a shard of that epoch, with its payload in the received bytes."""
    if payload.obj is not None and memoryview(payload.obj).nbytes > payload.nbytes + SPARE_BYTES:
        # A gradient may wait for long, and only its payload is counted: it must not keep the rest of the message.
        payload = memoryview(bytes(payload))
    # A payload without numbers needs no codec.
    codec = FLOAT32 if request.kind == common.PAYLOAD_KIND_NOTHING else CODECS.get(request.codec)
    codec = codec or codec_numbered(request.codec)
    return plan_of(request, payload, request.sender, codec, reply, epoch=epoch)


def plan_of(
    request: wire.PushRequest,
    payload: bytes | memoryview,
    sender: common.Sender,
    codec: Codec,
    reply: Reply | PublishedReply | None,
    *,
    epoch: int,
    memory: SharedMemory | None = None,
) -> PushPlan:
    """Return a push whose gradient lies in `payload`. `memory` is the worker's, if gradient and reply lie there."""
    extents: tuple[Extent, ...] = ()
    if request.extents:
        require_few_extents(len(request.extents))
        extents = tuple(Extent(extent.offset, extent.length) for extent in request.extents)
    nothing = request.kind == common.PAYLOAD_KIND_NOTHING
    gradient = Gradient(
        sender.worker_id,
        sender.incarnation,
        request.sequence,
        request.base_version,
        request.epoch,
        codec,
        b"" if nothing and memory is not None else payload,
        extents,
        request.kind or PayloadKind.GRADIENT,
        request.example_count,
        request.minibatch_count or 1,
        request.newest_base_version or None,
        request.clock,
        request.learning_rate if request.HasField("learning_rate") else None,
        request.momentum if request.HasField("momentum") else None,
        request.provisional,
        request.gradient_norm,
        memory is not None and not nothing,
        request.gradient_scale or 1.0,
        request.resent_staleness if request.HasField("resent_staleness") else None,
        request.num_rows,
    )
    # Everything is newer than a version of another epoch.
    holds = reply is not None and request.HasField("held_version") and request.epoch == epoch
    held_version = request.held_version if holds else -1
    return PushPlan(request.shard_id, gradient, reply, held_version, memory, sender.secret, request.data_position)


def codec_from(number: int) -> Codec:
    """Return the codec of the parameters that a caller requests; float32 by default."""
    return codec_numbered(number or FLOAT32, Codec.pulls, what="the parameters' codec")


def answer_of(pushed: Pushed, run: Run, *, epoch: int, codec: Codec, answer: wire.ExchangeReply) -> wire.ExchangeReply:
    """Fill in the answer to a part of an exchange, except for the parameters."""
    receipt, version, _ = pushed
    receipt_of(receipt, run, answer.receipt)
    if version is not None:
        # The shard's epoch: a duplicate's receipt may be of an earlier one.
        answer.version, answer.epoch, answer.codec = version, epoch, codec  # type: ignore[assignment]
    return answer


def receipt_of(receipt: Receipt, run: Run | None, message: common.Receipt | None = None) -> common.Receipt:
    """Return a receipt as a message; with a run, also what it requests of its worker from now on.

    An empty `message`, such as a field of a larger one, is filled instead of a new one.
    """
    message = common.Receipt() if message is None else message
    message.shard_id = receipt.shard_id
    message.sequence = receipt.sequence
    message.outcome = receipt.outcome  # type: ignore[assignment]
    message.version_before = receipt.version_before
    message.version_after = receipt.version_after
    message.staleness = receipt.staleness
    message.rate = receipt.rate
    message.rate_scale = receipt.rate_scale
    message.weight = receipt.weight
    message.num_workers = receipt.num_workers
    message.epoch = receipt.epoch
    message.min_version = receipt.min_version
    if receipt.duplicate:
        message.duplicate = True
    if receipt.outcome is not Outcome.APPLIED:
        message.reason = receipt.reason  # type: ignore[assignment]
        message.waiting_for.extend(receipt.waiting_for)
    if receipt.message:
        message.message = receipt.message
    if run is None:
        return message
    rounds = run.rounds
    if rounds.steps.pacer is not None and rounds.steps.asks:
        message.ask_to_proceed = True
    if rounds.behaviour.batch_growth and (batch_size := run.rounds.batch_size):
        message.batch_size = batch_size
    if (shard := run.content.shards.get(receipt.shard_id)) is not None:
        message.next_rate, message.examples = shard.next_rate, shard.examples
        if shard.durable_version:
            message.durable_version = shard.durable_version
    return message


# Of a group; 0 is read as GRADIENT.
_PUSHED_KINDS = (0, PayloadKind.GRADIENT, PayloadKind.DELTA, PayloadKind.BUFFER)


def settings_from(message: common.OptimizerSettings) -> RuleSettings | None:
    """Return a worker's optimizer, checked and completed; None if it is absent. Settings have defaults.

    Without a rule, which the worker leaves to the servers, it has the kinds of the groups' pushes alone.
    """
    if not (message.rule or message.groups):
        return None
    groups = tuple(dict(group.hyperparameters) for group in message.groups)
    unknown = next((group.kind for group in message.groups if group.kind not in _PUSHED_KINDS), None)
    if unknown is not None:
        raise InvalidArgument(f"a parameter group has kind {unknown}; expected GRADIENT (1), DELTA (2) or BUFFER (4)")
    kinds = tuple(PayloadKind(group.kind or PayloadKind.GRADIENT) for group in message.groups)
    if not message.rule:
        return RuleSettings("", groups, kinds)
    return RuleSettings.make(message.rule, groups or ({},), kinds or (PayloadKind.GRADIENT,))


def settings_to(settings: RuleSettings) -> common.OptimizerSettings:
    # Unspecified, where the first worker has yet to declare them.
    pairs = zip(settings.groups, settings.kinds or (0,) * len(settings.groups), strict=True)
    groups = [common.GroupSettings(hyperparameters=group, kind=kind) for group, kind in pairs]  # type: ignore[arg-type]
    return common.OptimizerSettings(rule=settings.rule, groups=groups)


def shard_versions(run: Run) -> list[common.ShardVersion]:
    content = run.content
    return [
        common.ShardVersion(
            shard_id=i,
            version=shard.version,
            next_rate=shard.next_rate,
            examples=shard.examples,
            first_crc=content.first_crcs.get(i),
        )
        for i, shard in content.shards.items()
    ]


def hello_reply(
    run: Run, greeting: Greeting, term: int, *, control_address: str, offers: Iterable[wire.HelloReply]
) -> wire.HelloReply:
    """Return the reply to Hello, with the offers of all transports."""
    config = run.config
    reply = wire.HelloReply(
        protocol_version=PROTOCOL_VERSION,
        features=(*FEATURES, *(["resend"] if config.resends else []), *(["resend_in_flight"] if run.standby else [])),
        software=SOFTWARE,
        state=int(run.state),  # type: ignore[arg-type]
        run_id=run.content.run_id,
        epoch=run.content.epoch,
        initialize=term > 0,
        term=term,
        initialize_lease_seconds=run.election.lease_seconds,
        limits=common.Limits(
            message_bytes_max=config.max_message_bytes,
            model_parameters_max=config.max_model_parameters,
            workers_max=config.max_workers,
            in_flight_bytes_max=config.max_in_flight_bytes,
        ),
        heartbeat_seconds=config.heartbeat_seconds,
        lease_seconds=config.lease_seconds,
        shards=shard_versions(run),
        clip_norm=run.rounds.behaviour.clip_norm,
        codecs=CODECS.values(),  # type: ignore[arg-type]
        server_index=run.content.server_index,
        num_servers=run.content.num_servers,
        control_address=control_address,
        secret=greeting.secret,
        origin=run.content.origin,
        data_position=run.position_for(greeting),
        **_changeable(run),
    )
    for offer in offers:
        reply.MergeFrom(offer)
    if run.content.settings is not None:
        reply.optimizer.CopyFrom(settings_to(run.content.settings))
    if run.content.partition is not None:
        reply.MergeFromString(run.content.partition.described)
    return reply


def heartbeat_reply(run: Run, *, known: bool) -> wire.HeartbeatReply:
    """Return the run's state and its settings, which may have changed."""
    state, reply = run.state, wire.HeartbeatReply
    return reply(
        known=known,
        epoch=run.content.epoch,
        state=int(state),  # type: ignore[arg-type]
        command=reply.COMMAND_STOP if state == RunState.FINISHED else reply.COMMAND_UNSPECIFIED,
        version=run.content.version_max,
        **_changeable(run),
    )


def _changeable(run: Run) -> dict[str, Any]:
    """Return the settings that Hello and each heartbeat report, as they may change."""
    aggregation, staleness = run.rounds.behaviour.aggregation, run.rounds.behaviour.staleness
    return {
        "protocol": aggregation.text,
        "staleness": spell_out(staleness.name, staleness),
        "accumulate": aggregation.accumulate,
        "current_version_only": aggregation.barrier,
        "updates_per_round": aggregation.at(run.content.version_max).updates_per_round,
        "ask_to_proceed": run.rounds.steps.asks,
        "batch_size": run.rounds.batch_size,
        "standby": run.standby,
    }


def for_people(text: str) -> str:
    """Return a caller's text fit for a log line and a table."""
    return "".join(character if character.isprintable() else "?" for character in text[:TEXT_LENGTH_MAX])
