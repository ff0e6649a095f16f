from pyps_wire import common_pb2 as _common_pb2
from pyps_wire import work_pb2 as _work_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HelloRequest(_message.Message):
    __slots__ = ("sender", "protocol_version", "features", "software", "role", "server_index", "num_servers", "model", "optimizer", "fingerprint", "codecs", "gradient_codec", "parameter_codec", "host", "process_id", "device", "parts", "replica", "yields", "worker_index")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    SERVER_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_SERVERS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_CODEC_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_CODEC_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    YIELDS_FIELD_NUMBER: _ClassVar[int]
    WORKER_INDEX_FIELD_NUMBER: _ClassVar[int]
    sender: _common_pb2.Sender
    protocol_version: int
    features: _containers.RepeatedScalarFieldContainer[str]
    software: str
    role: _common_pb2.Role
    server_index: int
    num_servers: int
    model: _common_pb2.ModelSpec
    optimizer: _common_pb2.OptimizerSettings
    fingerprint: str
    codecs: _containers.RepeatedScalarFieldContainer[_common_pb2.Codec]
    gradient_codec: _common_pb2.Codec
    parameter_codec: _common_pb2.Codec
    host: str
    process_id: int
    device: str
    parts: _containers.RepeatedScalarFieldContainer[int]
    replica: str
    yields: bool
    worker_index: int
    def __init__(self, sender: _Optional[_Union[_common_pb2.Sender, _Mapping]] = ..., protocol_version: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ..., software: _Optional[str] = ..., role: _Optional[_Union[_common_pb2.Role, str]] = ..., server_index: _Optional[int] = ..., num_servers: _Optional[int] = ..., model: _Optional[_Union[_common_pb2.ModelSpec, _Mapping]] = ..., optimizer: _Optional[_Union[_common_pb2.OptimizerSettings, _Mapping]] = ..., fingerprint: _Optional[str] = ..., codecs: _Optional[_Iterable[_Union[_common_pb2.Codec, str]]] = ..., gradient_codec: _Optional[_Union[_common_pb2.Codec, str]] = ..., parameter_codec: _Optional[_Union[_common_pb2.Codec, str]] = ..., host: _Optional[str] = ..., process_id: _Optional[int] = ..., device: _Optional[str] = ..., parts: _Optional[_Iterable[int]] = ..., replica: _Optional[str] = ..., yields: bool = ..., worker_index: _Optional[int] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("protocol_version", "features", "software", "state", "run_id", "epoch", "initialize", "term", "initialize_lease_seconds", "limits", "heartbeat_seconds", "lease_seconds", "model", "optimizer", "fingerprint", "shards", "protocol", "staleness", "codecs", "server_index", "num_servers", "control_address", "ask_to_proceed", "batch_size", "accumulate", "clip_norm", "current_version_only", "local", "lane", "secret", "shard_lengths", "placement", "updates_per_round", "standby", "origin", "data_position")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INITIALIZE_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    INITIALIZE_LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    SERVER_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_SERVERS_FIELD_NUMBER: _ClassVar[int]
    CONTROL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ASK_TO_PROCEED_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    ACCUMULATE_FIELD_NUMBER: _ClassVar[int]
    CLIP_NORM_FIELD_NUMBER: _ClassVar[int]
    CURRENT_VERSION_ONLY_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    SHARD_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    UPDATES_PER_ROUND_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    DATA_POSITION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    features: _containers.RepeatedScalarFieldContainer[str]
    software: str
    state: _common_pb2.RunState
    run_id: str
    epoch: int
    initialize: bool
    term: int
    initialize_lease_seconds: float
    limits: _common_pb2.Limits
    heartbeat_seconds: float
    lease_seconds: float
    model: _common_pb2.ModelSpec
    optimizer: _common_pb2.OptimizerSettings
    fingerprint: str
    shards: _containers.RepeatedCompositeFieldContainer[_common_pb2.ShardVersion]
    protocol: str
    staleness: str
    codecs: _containers.RepeatedScalarFieldContainer[_common_pb2.Codec]
    server_index: int
    num_servers: int
    control_address: str
    ask_to_proceed: bool
    batch_size: int
    accumulate: int
    clip_norm: float
    current_version_only: bool
    local: LocalTransport
    lane: LaneOffer
    secret: bytes
    shard_lengths: _containers.RepeatedScalarFieldContainer[int]
    placement: _containers.RepeatedScalarFieldContainer[int]
    updates_per_round: int
    standby: str
    origin: str
    data_position: bytes
    def __init__(self, protocol_version: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ..., software: _Optional[str] = ..., state: _Optional[_Union[_common_pb2.RunState, str]] = ..., run_id: _Optional[str] = ..., epoch: _Optional[int] = ..., initialize: bool = ..., term: _Optional[int] = ..., initialize_lease_seconds: _Optional[float] = ..., limits: _Optional[_Union[_common_pb2.Limits, _Mapping]] = ..., heartbeat_seconds: _Optional[float] = ..., lease_seconds: _Optional[float] = ..., model: _Optional[_Union[_common_pb2.ModelSpec, _Mapping]] = ..., optimizer: _Optional[_Union[_common_pb2.OptimizerSettings, _Mapping]] = ..., fingerprint: _Optional[str] = ..., shards: _Optional[_Iterable[_Union[_common_pb2.ShardVersion, _Mapping]]] = ..., protocol: _Optional[str] = ..., staleness: _Optional[str] = ..., codecs: _Optional[_Iterable[_Union[_common_pb2.Codec, str]]] = ..., server_index: _Optional[int] = ..., num_servers: _Optional[int] = ..., control_address: _Optional[str] = ..., ask_to_proceed: bool = ..., batch_size: _Optional[int] = ..., accumulate: _Optional[int] = ..., clip_norm: _Optional[float] = ..., current_version_only: bool = ..., local: _Optional[_Union[LocalTransport, _Mapping]] = ..., lane: _Optional[_Union[LaneOffer, _Mapping]] = ..., secret: _Optional[bytes] = ..., shard_lengths: _Optional[_Iterable[int]] = ..., placement: _Optional[_Iterable[int]] = ..., updates_per_round: _Optional[int] = ..., standby: _Optional[str] = ..., origin: _Optional[str] = ..., data_position: _Optional[bytes] = ...) -> None: ...

class LaneOffer(_message.Message):
    __slots__ = ("port", "ticket")
    PORT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    port: int
    ticket: bytes
    def __init__(self, port: _Optional[int] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class LocalTransport(_message.Message):
    __slots__ = ("address", "ticket")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    address: str
    ticket: bytes
    def __init__(self, address: _Optional[str] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class InitializeRequest(_message.Message):
    __slots__ = ("sender", "term", "model", "optimizer", "server_index", "num_servers", "shard_id", "codec", "replica", "shard_lengths", "placement", "payload")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    SERVER_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_SERVERS_FIELD_NUMBER: _ClassVar[int]
    SHARD_ID_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    SHARD_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    sender: _common_pb2.Sender
    term: int
    model: _common_pb2.ModelSpec
    optimizer: _common_pb2.OptimizerSettings
    server_index: int
    num_servers: int
    shard_id: int
    codec: _common_pb2.Codec
    replica: str
    shard_lengths: _containers.RepeatedScalarFieldContainer[int]
    placement: _containers.RepeatedScalarFieldContainer[int]
    payload: bytes
    def __init__(self, sender: _Optional[_Union[_common_pb2.Sender, _Mapping]] = ..., term: _Optional[int] = ..., model: _Optional[_Union[_common_pb2.ModelSpec, _Mapping]] = ..., optimizer: _Optional[_Union[_common_pb2.OptimizerSettings, _Mapping]] = ..., server_index: _Optional[int] = ..., num_servers: _Optional[int] = ..., shard_id: _Optional[int] = ..., codec: _Optional[_Union[_common_pb2.Codec, str]] = ..., replica: _Optional[str] = ..., shard_lengths: _Optional[_Iterable[int]] = ..., placement: _Optional[_Iterable[int]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class InitializeReply(_message.Message):
    __slots__ = ("state", "epoch", "shards")
    STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    state: _common_pb2.RunState
    epoch: int
    shards: _containers.RepeatedCompositeFieldContainer[_common_pb2.ShardVersion]
    def __init__(self, state: _Optional[_Union[_common_pb2.RunState, str]] = ..., epoch: _Optional[int] = ..., shards: _Optional[_Iterable[_Union[_common_pb2.ShardVersion, _Mapping]]] = ...) -> None: ...

class PushRequest(_message.Message):
    __slots__ = ("sender", "sequence", "shard_id", "base_version", "newest_base_version", "epoch", "codec", "kind", "extents", "example_count", "minibatch_count", "clock", "learning_rate", "momentum", "provisional", "gradient_norm", "num_shards", "reply_codec", "held_version", "scale_follows", "num_held", "gradient_scale", "resent_staleness", "data_position", "num_rows", "payload")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SHARD_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    NEWEST_BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    EXAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    MINIBATCH_COUNT_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    PROVISIONAL_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_NORM_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    REPLY_CODEC_FIELD_NUMBER: _ClassVar[int]
    HELD_VERSION_FIELD_NUMBER: _ClassVar[int]
    SCALE_FOLLOWS_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_SCALE_FIELD_NUMBER: _ClassVar[int]
    RESENT_STALENESS_FIELD_NUMBER: _ClassVar[int]
    DATA_POSITION_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    sender: _common_pb2.Sender
    sequence: int
    shard_id: int
    base_version: int
    newest_base_version: int
    epoch: int
    codec: _common_pb2.Codec
    kind: _common_pb2.PayloadKind
    extents: _containers.RepeatedCompositeFieldContainer[_common_pb2.Extent]
    example_count: int
    minibatch_count: int
    clock: int
    learning_rate: float
    momentum: float
    provisional: bool
    gradient_norm: float
    num_shards: int
    reply_codec: _common_pb2.Codec
    held_version: int
    scale_follows: bool
    num_held: int
    gradient_scale: float
    resent_staleness: int
    data_position: bytes
    num_rows: int
    payload: bytes
    def __init__(self, sender: _Optional[_Union[_common_pb2.Sender, _Mapping]] = ..., sequence: _Optional[int] = ..., shard_id: _Optional[int] = ..., base_version: _Optional[int] = ..., newest_base_version: _Optional[int] = ..., epoch: _Optional[int] = ..., codec: _Optional[_Union[_common_pb2.Codec, str]] = ..., kind: _Optional[_Union[_common_pb2.PayloadKind, str]] = ..., extents: _Optional[_Iterable[_Union[_common_pb2.Extent, _Mapping]]] = ..., example_count: _Optional[int] = ..., minibatch_count: _Optional[int] = ..., clock: _Optional[int] = ..., learning_rate: _Optional[float] = ..., momentum: _Optional[float] = ..., provisional: bool = ..., gradient_norm: _Optional[float] = ..., num_shards: _Optional[int] = ..., reply_codec: _Optional[_Union[_common_pb2.Codec, str]] = ..., held_version: _Optional[int] = ..., scale_follows: bool = ..., num_held: _Optional[int] = ..., gradient_scale: _Optional[float] = ..., resent_staleness: _Optional[int] = ..., data_position: _Optional[bytes] = ..., num_rows: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("sender", "role", "epoch", "codec", "wants", "wait_milliseconds", "portion")
    class Want(_message.Message):
        __slots__ = ("shard_id", "held_version", "min_version", "ids")
        SHARD_ID_FIELD_NUMBER: _ClassVar[int]
        HELD_VERSION_FIELD_NUMBER: _ClassVar[int]
        MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
        IDS_FIELD_NUMBER: _ClassVar[int]
        shard_id: int
        held_version: int
        min_version: int
        ids: bytes
        def __init__(self, shard_id: _Optional[int] = ..., held_version: _Optional[int] = ..., min_version: _Optional[int] = ..., ids: _Optional[bytes] = ...) -> None: ...
    SENDER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    WANTS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    PORTION_FIELD_NUMBER: _ClassVar[int]
    sender: _common_pb2.Sender
    role: _common_pb2.Role
    epoch: int
    codec: _common_pb2.Codec
    wants: _containers.RepeatedCompositeFieldContainer[PullRequest.Want]
    wait_milliseconds: int
    portion: _work_pb2.LeaseRequest
    def __init__(self, sender: _Optional[_Union[_common_pb2.Sender, _Mapping]] = ..., role: _Optional[_Union[_common_pb2.Role, str]] = ..., epoch: _Optional[int] = ..., codec: _Optional[_Union[_common_pb2.Codec, str]] = ..., wants: _Optional[_Iterable[_Union[PullRequest.Want, _Mapping]]] = ..., wait_milliseconds: _Optional[int] = ..., portion: _Optional[_Union[_work_pb2.LeaseRequest, _Mapping]] = ...) -> None: ...

class Parameters(_message.Message):
    __slots__ = ("shard_id", "version", "epoch", "codec", "lease", "differences", "payload")
    SHARD_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    shard_id: int
    version: int
    epoch: int
    codec: _common_pb2.Codec
    lease: _work_pb2.LeaseReply
    differences: Differences
    payload: bytes
    def __init__(self, shard_id: _Optional[int] = ..., version: _Optional[int] = ..., epoch: _Optional[int] = ..., codec: _Optional[_Union[_common_pb2.Codec, str]] = ..., lease: _Optional[_Union[_work_pb2.LeaseReply, _Mapping]] = ..., differences: _Optional[_Union[Differences, _Mapping]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class Differences(_message.Message):
    __slots__ = ("since_version", "sizes")
    SINCE_VERSION_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    since_version: int
    sizes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, since_version: _Optional[int] = ..., sizes: _Optional[_Iterable[int]] = ...) -> None: ...

class ExchangeReply(_message.Message):
    __slots__ = ("receipt", "version", "epoch", "codec", "differences", "payload")
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    receipt: _common_pb2.Receipt
    version: int
    epoch: int
    codec: _common_pb2.Codec
    differences: Differences
    payload: bytes
    def __init__(self, receipt: _Optional[_Union[_common_pb2.Receipt, _Mapping]] = ..., version: _Optional[int] = ..., epoch: _Optional[int] = ..., codec: _Optional[_Union[_common_pb2.Codec, str]] = ..., differences: _Optional[_Union[Differences, _Mapping]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class ProceedRequest(_message.Message):
    __slots__ = ("sender", "clock", "wait_milliseconds")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    WAIT_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    sender: _common_pb2.Sender
    clock: int
    wait_milliseconds: int
    def __init__(self, sender: _Optional[_Union[_common_pb2.Sender, _Mapping]] = ..., clock: _Optional[int] = ..., wait_milliseconds: _Optional[int] = ...) -> None: ...

class ProceedReply(_message.Message):
    __slots__ = ("ask_to_proceed",)
    ASK_TO_PROCEED_FIELD_NUMBER: _ClassVar[int]
    ask_to_proceed: bool
    def __init__(self, ask_to_proceed: bool = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("sender", "clock", "scalars")
    class ScalarsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SENDER_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    SCALARS_FIELD_NUMBER: _ClassVar[int]
    sender: _common_pb2.Sender
    clock: int
    scalars: _containers.ScalarMap[str, float]
    def __init__(self, sender: _Optional[_Union[_common_pb2.Sender, _Mapping]] = ..., clock: _Optional[int] = ..., scalars: _Optional[_Mapping[str, float]] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("known", "epoch", "state", "command", "version", "protocol", "staleness", "accumulate", "current_version_only", "ask_to_proceed", "batch_size", "updates_per_round", "standby")
    class Command(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        COMMAND_UNSPECIFIED: _ClassVar[HeartbeatReply.Command]
        COMMAND_STOP: _ClassVar[HeartbeatReply.Command]
    COMMAND_UNSPECIFIED: HeartbeatReply.Command
    COMMAND_STOP: HeartbeatReply.Command
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    ACCUMULATE_FIELD_NUMBER: _ClassVar[int]
    CURRENT_VERSION_ONLY_FIELD_NUMBER: _ClassVar[int]
    ASK_TO_PROCEED_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    UPDATES_PER_ROUND_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    known: bool
    epoch: int
    state: _common_pb2.RunState
    command: HeartbeatReply.Command
    version: int
    protocol: str
    staleness: str
    accumulate: int
    current_version_only: bool
    ask_to_proceed: bool
    batch_size: int
    updates_per_round: int
    standby: str
    def __init__(self, known: bool = ..., epoch: _Optional[int] = ..., state: _Optional[_Union[_common_pb2.RunState, str]] = ..., command: _Optional[_Union[HeartbeatReply.Command, str]] = ..., version: _Optional[int] = ..., protocol: _Optional[str] = ..., staleness: _Optional[str] = ..., accumulate: _Optional[int] = ..., current_version_only: bool = ..., ask_to_proceed: bool = ..., batch_size: _Optional[int] = ..., updates_per_round: _Optional[int] = ..., standby: _Optional[str] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("sender", "cause", "message")
    class Cause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CAUSE_UNSPECIFIED: _ClassVar[LeaveRequest.Cause]
        CAUSE_FINISHED: _ClassVar[LeaveRequest.Cause]
        CAUSE_FAILED: _ClassVar[LeaveRequest.Cause]
    CAUSE_UNSPECIFIED: LeaveRequest.Cause
    CAUSE_FINISHED: LeaveRequest.Cause
    CAUSE_FAILED: LeaveRequest.Cause
    SENDER_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    sender: _common_pb2.Sender
    cause: LeaveRequest.Cause
    message: str
    def __init__(self, sender: _Optional[_Union[_common_pb2.Sender, _Mapping]] = ..., cause: _Optional[_Union[LeaveRequest.Cause, str]] = ..., message: _Optional[str] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ("num_workers",)
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    num_workers: int
    def __init__(self, num_workers: _Optional[int] = ...) -> None: ...
