from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Codec(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CODEC_UNSPECIFIED: _ClassVar[Codec]
    CODEC_FLOAT32: _ClassVar[Codec]
    CODEC_FLOAT16: _ClassVar[Codec]
    CODEC_BFLOAT16: _ClassVar[Codec]
    CODEC_INT8: _ClassVar[Codec]
    CODEC_INT4: _ClassVar[Codec]
    CODEC_ONEBIT: _ClassVar[Codec]
    CODEC_THRESHOLD: _ClassVar[Codec]
    CODEC_TOPK: _ClassVar[Codec]
    CODEC_TOPK2BIT: _ClassVar[Codec]
    CODEC_DELTA: _ClassVar[Codec]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_WORKER: _ClassVar[Role]
    ROLE_OBSERVER: _ClassVar[Role]

class PayloadKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAYLOAD_KIND_UNSPECIFIED: _ClassVar[PayloadKind]
    PAYLOAD_KIND_GRADIENT: _ClassVar[PayloadKind]
    PAYLOAD_KIND_DELTA: _ClassVar[PayloadKind]
    PAYLOAD_KIND_NOTHING: _ClassVar[PayloadKind]
    PAYLOAD_KIND_BUFFER: _ClassVar[PayloadKind]

class RunState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUN_STATE_UNSPECIFIED: _ClassVar[RunState]
    RUN_STATE_EMPTY: _ClassVar[RunState]
    RUN_STATE_INITIALIZING: _ClassVar[RunState]
    RUN_STATE_READY: _ClassVar[RunState]
    RUN_STATE_FINISHED: _ClassVar[RunState]
    RUN_STATE_DRAINING: _ClassVar[RunState]
    RUN_STATE_STANDBY: _ClassVar[RunState]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_APPLIED: _ClassVar[Outcome]
    OUTCOME_PENDING: _ClassVar[Outcome]
    OUTCOME_REJECTED: _ClassVar[Outcome]
    OUTCOME_HELD: _ClassVar[Outcome]
    OUTCOME_NOT_HELD: _ClassVar[Outcome]

class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASON_UNSPECIFIED: _ClassVar[Reason]
    REASON_NOT_FINITE: _ClassVar[Reason]
    REASON_STALE: _ClassVar[Reason]
    REASON_EPOCH: _ClassVar[Reason]
    REASON_FINISHED: _ClassVar[Reason]
    REASON_FORGOTTEN: _ClassVar[Reason]
    REASON_DROPPED: _ClassVar[Reason]
    REASON_REPEATED: _ClassVar[Reason]
CODEC_UNSPECIFIED: Codec
CODEC_FLOAT32: Codec
CODEC_FLOAT16: Codec
CODEC_BFLOAT16: Codec
CODEC_INT8: Codec
CODEC_INT4: Codec
CODEC_ONEBIT: Codec
CODEC_THRESHOLD: Codec
CODEC_TOPK: Codec
CODEC_TOPK2BIT: Codec
CODEC_DELTA: Codec
ROLE_UNSPECIFIED: Role
ROLE_WORKER: Role
ROLE_OBSERVER: Role
PAYLOAD_KIND_UNSPECIFIED: PayloadKind
PAYLOAD_KIND_GRADIENT: PayloadKind
PAYLOAD_KIND_DELTA: PayloadKind
PAYLOAD_KIND_NOTHING: PayloadKind
PAYLOAD_KIND_BUFFER: PayloadKind
RUN_STATE_UNSPECIFIED: RunState
RUN_STATE_EMPTY: RunState
RUN_STATE_INITIALIZING: RunState
RUN_STATE_READY: RunState
RUN_STATE_FINISHED: RunState
RUN_STATE_DRAINING: RunState
RUN_STATE_STANDBY: RunState
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_APPLIED: Outcome
OUTCOME_PENDING: Outcome
OUTCOME_REJECTED: Outcome
OUTCOME_HELD: Outcome
OUTCOME_NOT_HELD: Outcome
REASON_UNSPECIFIED: Reason
REASON_NOT_FINITE: Reason
REASON_STALE: Reason
REASON_EPOCH: Reason
REASON_FINISHED: Reason
REASON_FORGOTTEN: Reason
REASON_DROPPED: Reason
REASON_REPEATED: Reason

class TensorSpec(_message.Message):
    __slots__ = ("name", "shape", "group", "whole_shape", "offset", "part", "table")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    WHOLE_SHAPE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    group: int
    whole_shape: _containers.RepeatedScalarFieldContainer[int]
    offset: _containers.RepeatedScalarFieldContainer[int]
    part: int
    table: str
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., group: _Optional[int] = ..., whole_shape: _Optional[_Iterable[int]] = ..., offset: _Optional[_Iterable[int]] = ..., part: _Optional[int] = ..., table: _Optional[str] = ...) -> None: ...

class ModelSpec(_message.Message):
    __slots__ = ("tensors", "name")
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    name: str
    def __init__(self, tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., name: _Optional[str] = ...) -> None: ...

class GroupSettings(_message.Message):
    __slots__ = ("hyperparameters", "kind")
    class HyperparametersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    HYPERPARAMETERS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    hyperparameters: _containers.ScalarMap[str, float]
    kind: PayloadKind
    def __init__(self, hyperparameters: _Optional[_Mapping[str, float]] = ..., kind: _Optional[_Union[PayloadKind, str]] = ...) -> None: ...

class OptimizerSettings(_message.Message):
    __slots__ = ("rule", "groups")
    RULE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    rule: str
    groups: _containers.RepeatedCompositeFieldContainer[GroupSettings]
    def __init__(self, rule: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[GroupSettings, _Mapping]]] = ...) -> None: ...

class Sender(_message.Message):
    __slots__ = ("run_id", "worker_id", "incarnation", "secret")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    worker_id: str
    incarnation: int
    secret: bytes
    def __init__(self, run_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., secret: _Optional[bytes] = ...) -> None: ...

class Extent(_message.Message):
    __slots__ = ("offset", "length")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    offset: int
    length: int
    def __init__(self, offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class ShardVersion(_message.Message):
    __slots__ = ("shard_id", "version", "next_rate", "examples", "first_crc")
    SHARD_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NEXT_RATE_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    FIRST_CRC_FIELD_NUMBER: _ClassVar[int]
    shard_id: int
    version: int
    next_rate: float
    examples: int
    first_crc: int
    def __init__(self, shard_id: _Optional[int] = ..., version: _Optional[int] = ..., next_rate: _Optional[float] = ..., examples: _Optional[int] = ..., first_crc: _Optional[int] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("shard_id", "sequence", "outcome", "reason", "message", "duplicate", "version_before", "version_after", "staleness", "rate", "rate_scale", "weight", "num_workers", "epoch", "min_version", "ask_to_proceed", "batch_size", "waiting_for", "durable_version", "next_rate", "examples")
    SHARD_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_BEFORE_FIELD_NUMBER: _ClassVar[int]
    VERSION_AFTER_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    RATE_SCALE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    ASK_TO_PROCEED_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    DURABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    NEXT_RATE_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    shard_id: int
    sequence: int
    outcome: Outcome
    reason: Reason
    message: str
    duplicate: bool
    version_before: int
    version_after: int
    staleness: int
    rate: float
    rate_scale: float
    weight: float
    num_workers: int
    epoch: int
    min_version: int
    ask_to_proceed: bool
    batch_size: int
    waiting_for: _containers.RepeatedScalarFieldContainer[str]
    durable_version: int
    next_rate: float
    examples: int
    def __init__(self, shard_id: _Optional[int] = ..., sequence: _Optional[int] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., reason: _Optional[_Union[Reason, str]] = ..., message: _Optional[str] = ..., duplicate: bool = ..., version_before: _Optional[int] = ..., version_after: _Optional[int] = ..., staleness: _Optional[int] = ..., rate: _Optional[float] = ..., rate_scale: _Optional[float] = ..., weight: _Optional[float] = ..., num_workers: _Optional[int] = ..., epoch: _Optional[int] = ..., min_version: _Optional[int] = ..., ask_to_proceed: bool = ..., batch_size: _Optional[int] = ..., waiting_for: _Optional[_Iterable[str]] = ..., durable_version: _Optional[int] = ..., next_rate: _Optional[float] = ..., examples: _Optional[int] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("message_bytes_max", "model_parameters_max", "workers_max", "in_flight_bytes_max")
    MESSAGE_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    MODEL_PARAMETERS_MAX_FIELD_NUMBER: _ClassVar[int]
    WORKERS_MAX_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    message_bytes_max: int
    model_parameters_max: int
    workers_max: int
    in_flight_bytes_max: int
    def __init__(self, message_bytes_max: _Optional[int] = ..., model_parameters_max: _Optional[int] = ..., workers_max: _Optional[int] = ..., in_flight_bytes_max: _Optional[int] = ...) -> None: ...
