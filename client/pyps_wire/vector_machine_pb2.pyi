from pyps_wire import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttachRequest(_message.Message):
    __slots__ = ("sender", "coordinator_epoch", "history_pairs", "vectors", "stages", "num_portions")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    HISTORY_PAIRS_FIELD_NUMBER: _ClassVar[int]
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_PORTIONS_FIELD_NUMBER: _ClassVar[int]
    sender: _common_pb2.Sender
    coordinator_epoch: int
    history_pairs: int
    vectors: int
    stages: int
    num_portions: int
    def __init__(self, sender: _Optional[_Union[_common_pb2.Sender, _Mapping]] = ..., coordinator_epoch: _Optional[int] = ..., history_pairs: _Optional[int] = ..., vectors: _Optional[int] = ..., stages: _Optional[int] = ..., num_portions: _Optional[int] = ...) -> None: ...

class AttachReply(_message.Message):
    __slots__ = ("coordinator_epoch", "iteration", "state", "vectors", "num_parameters", "planned_bytes", "secret")
    COORDINATOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    PLANNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    coordinator_epoch: int
    iteration: int
    state: str
    vectors: _containers.RepeatedScalarFieldContainer[str]
    num_parameters: int
    planned_bytes: int
    secret: bytes
    def __init__(self, coordinator_epoch: _Optional[int] = ..., iteration: _Optional[int] = ..., state: _Optional[str] = ..., vectors: _Optional[_Iterable[str]] = ..., num_parameters: _Optional[int] = ..., planned_bytes: _Optional[int] = ..., secret: _Optional[bytes] = ...) -> None: ...

class Instruction(_message.Message):
    __slots__ = ("operation", "target", "left", "right", "scalar", "names", "others", "scalars", "stage_ids", "count")
    class Operation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OPERATION_UNSPECIFIED: _ClassVar[Instruction.Operation]
        OPERATION_ALLOC: _ClassVar[Instruction.Operation]
        OPERATION_COPY: _ClassVar[Instruction.Operation]
        OPERATION_COMBINE: _ClassVar[Instruction.Operation]
        OPERATION_DOT: _ClassVar[Instruction.Operation]
        OPERATION_NORM1: _ClassVar[Instruction.Operation]
        OPERATION_NORM_INF: _ClassVar[Instruction.Operation]
        OPERATION_GRAM: _ClassVar[Instruction.Operation]
        OPERATION_FOLD: _ClassVar[Instruction.Operation]
        OPERATION_PUSH_HISTORY: _ClassVar[Instruction.Operation]
        OPERATION_DROP_OLDEST: _ClassVar[Instruction.Operation]
        OPERATION_MOVE: _ClassVar[Instruction.Operation]
        OPERATION_BEGIN_PASS: _ClassVar[Instruction.Operation]
    OPERATION_UNSPECIFIED: Instruction.Operation
    OPERATION_ALLOC: Instruction.Operation
    OPERATION_COPY: Instruction.Operation
    OPERATION_COMBINE: Instruction.Operation
    OPERATION_DOT: Instruction.Operation
    OPERATION_NORM1: Instruction.Operation
    OPERATION_NORM_INF: Instruction.Operation
    OPERATION_GRAM: Instruction.Operation
    OPERATION_FOLD: Instruction.Operation
    OPERATION_PUSH_HISTORY: Instruction.Operation
    OPERATION_DROP_OLDEST: Instruction.Operation
    OPERATION_MOVE: Instruction.Operation
    OPERATION_BEGIN_PASS: Instruction.Operation
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    RIGHT_FIELD_NUMBER: _ClassVar[int]
    SCALAR_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    SCALARS_FIELD_NUMBER: _ClassVar[int]
    STAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    operation: Instruction.Operation
    target: str
    left: str
    right: str
    scalar: float
    names: _containers.RepeatedScalarFieldContainer[str]
    others: _containers.RepeatedScalarFieldContainer[str]
    scalars: _containers.RepeatedScalarFieldContainer[float]
    stage_ids: _containers.RepeatedScalarFieldContainer[int]
    count: int
    def __init__(self, operation: _Optional[_Union[Instruction.Operation, str]] = ..., target: _Optional[str] = ..., left: _Optional[str] = ..., right: _Optional[str] = ..., scalar: _Optional[float] = ..., names: _Optional[_Iterable[str]] = ..., others: _Optional[_Iterable[str]] = ..., scalars: _Optional[_Iterable[float]] = ..., stage_ids: _Optional[_Iterable[int]] = ..., count: _Optional[int] = ...) -> None: ...

class ExecuteRequest(_message.Message):
    __slots__ = ("sender", "coordinator_epoch", "op_seq", "instructions", "commits_iteration", "state")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    OP_SEQ_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTIONS_FIELD_NUMBER: _ClassVar[int]
    COMMITS_ITERATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    sender: _common_pb2.Sender
    coordinator_epoch: int
    op_seq: int
    instructions: _containers.RepeatedCompositeFieldContainer[Instruction]
    commits_iteration: int
    state: str
    def __init__(self, sender: _Optional[_Union[_common_pb2.Sender, _Mapping]] = ..., coordinator_epoch: _Optional[int] = ..., op_seq: _Optional[int] = ..., instructions: _Optional[_Iterable[_Union[Instruction, _Mapping]]] = ..., commits_iteration: _Optional[int] = ..., state: _Optional[str] = ...) -> None: ...

class ExecuteReply(_message.Message):
    __slots__ = ("scalars", "version")
    SCALARS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    scalars: _containers.RepeatedScalarFieldContainer[float]
    version: int
    def __init__(self, scalars: _Optional[_Iterable[float]] = ..., version: _Optional[int] = ...) -> None: ...

class StageRequest(_message.Message):
    __slots__ = ("sender", "portion_id", "stage_id", "shard_id", "num_shards", "codec", "payload")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    PASS_FIELD_NUMBER: _ClassVar[int]
    PORTION_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    sender: _common_pb2.Sender
    portion_id: int
    stage_id: int
    shard_id: int
    num_shards: int
    codec: _common_pb2.Codec
    payload: bytes
    def __init__(self, sender: _Optional[_Union[_common_pb2.Sender, _Mapping]] = ..., portion_id: _Optional[int] = ..., stage_id: _Optional[int] = ..., shard_id: _Optional[int] = ..., num_shards: _Optional[int] = ..., codec: _Optional[_Union[_common_pb2.Codec, str]] = ..., payload: _Optional[bytes] = ..., **kwargs) -> None: ...

class StageReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
