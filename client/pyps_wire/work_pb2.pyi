from pyps_wire import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DataSpec(_message.Message):
    __slots__ = ("name", "num_examples", "portion_examples", "batch_size", "shuffle", "seed", "coordinated")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    PORTION_EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    SHUFFLE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    COORDINATED_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_examples: int
    portion_examples: int
    batch_size: int
    shuffle: bool
    seed: int
    coordinated: bool
    def __init__(self, name: _Optional[str] = ..., num_examples: _Optional[int] = ..., portion_examples: _Optional[int] = ..., batch_size: _Optional[int] = ..., shuffle: bool = ..., seed: _Optional[int] = ..., coordinated: bool = ...) -> None: ...

class OpenWorkRequest(_message.Message):
    __slots__ = ("sender", "data")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    sender: _common_pb2.Sender
    data: DataSpec
    def __init__(self, sender: _Optional[_Union[_common_pb2.Sender, _Mapping]] = ..., data: _Optional[_Union[DataSpec, _Mapping]] = ...) -> None: ...

class OpenWorkReply(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    PASS_FIELD_NUMBER: _ClassVar[int]
    data: DataSpec
    def __init__(self, data: _Optional[_Union[DataSpec, _Mapping]] = ..., **kwargs) -> None: ...

class Portion(_message.Message):
    __slots__ = ("portion_id", "start", "stop", "lease_id")
    PORTION_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    portion_id: int
    start: int
    stop: int
    lease_id: int
    def __init__(self, portion_id: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., lease_id: _Optional[int] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("sender", "wait_milliseconds", "held", "passes")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    PASS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    sender: _common_pb2.Sender
    wait_milliseconds: int
    held: _containers.RepeatedScalarFieldContainer[int]
    passes: int
    def __init__(self, sender: _Optional[_Union[_common_pb2.Sender, _Mapping]] = ..., wait_milliseconds: _Optional[int] = ..., held: _Optional[_Iterable[int]] = ..., passes: _Optional[int] = ..., **kwargs) -> None: ...

class LeaseReply(_message.Message):
    __slots__ = ("outcome", "portion", "next", "batch_size", "portions_per_stage", "message")
    class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OUTCOME_UNSPECIFIED: _ClassVar[LeaseReply.Outcome]
        OUTCOME_LEASED: _ClassVar[LeaseReply.Outcome]
        OUTCOME_NOTHING_NOW: _ClassVar[LeaseReply.Outcome]
        OUTCOME_PASS_DONE: _ClassVar[LeaseReply.Outcome]
        OUTCOME_ENDED: _ClassVar[LeaseReply.Outcome]
    OUTCOME_UNSPECIFIED: LeaseReply.Outcome
    OUTCOME_LEASED: LeaseReply.Outcome
    OUTCOME_NOTHING_NOW: LeaseReply.Outcome
    OUTCOME_PASS_DONE: LeaseReply.Outcome
    OUTCOME_ENDED: LeaseReply.Outcome
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    PASS_FIELD_NUMBER: _ClassVar[int]
    PORTION_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    PORTIONS_PER_STAGE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    outcome: LeaseReply.Outcome
    portion: Portion
    next: Portion
    batch_size: int
    portions_per_stage: int
    message: str
    def __init__(self, outcome: _Optional[_Union[LeaseReply.Outcome, str]] = ..., portion: _Optional[_Union[Portion, _Mapping]] = ..., next: _Optional[_Union[Portion, _Mapping]] = ..., batch_size: _Optional[int] = ..., portions_per_stage: _Optional[int] = ..., message: _Optional[str] = ..., **kwargs) -> None: ...

class ClaimRequest(_message.Message):
    __slots__ = ("sender", "lease_id")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    sender: _common_pb2.Sender
    lease_id: int
    def __init__(self, sender: _Optional[_Union[_common_pb2.Sender, _Mapping]] = ..., lease_id: _Optional[int] = ...) -> None: ...

class ClaimReply(_message.Message):
    __slots__ = ("granted", "message")
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    granted: bool
    message: str
    def __init__(self, granted: bool = ..., message: _Optional[str] = ...) -> None: ...

class DeliverRequest(_message.Message):
    __slots__ = ("sender", "lease_ids", "stage_id", "loss_sum", "example_count")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    STAGE_ID_FIELD_NUMBER: _ClassVar[int]
    LOSS_SUM_FIELD_NUMBER: _ClassVar[int]
    EXAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    sender: _common_pb2.Sender
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    stage_id: int
    loss_sum: float
    example_count: int
    def __init__(self, sender: _Optional[_Union[_common_pb2.Sender, _Mapping]] = ..., lease_ids: _Optional[_Iterable[int]] = ..., stage_id: _Optional[int] = ..., loss_sum: _Optional[float] = ..., example_count: _Optional[int] = ...) -> None: ...

class DeliverReply(_message.Message):
    __slots__ = ("accepted", "message")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    message: str
    def __init__(self, accepted: bool = ..., message: _Optional[str] = ...) -> None: ...

class BeginPassRequest(_message.Message):
    __slots__ = ("sender", "coordinator_epoch", "num_portions", "copies_max", "portions_per_stage", "scalars")
    class ScalarsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SENDER_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PASS_FIELD_NUMBER: _ClassVar[int]
    NUM_PORTIONS_FIELD_NUMBER: _ClassVar[int]
    COPIES_MAX_FIELD_NUMBER: _ClassVar[int]
    PORTIONS_PER_STAGE_FIELD_NUMBER: _ClassVar[int]
    SCALARS_FIELD_NUMBER: _ClassVar[int]
    sender: _common_pb2.Sender
    coordinator_epoch: int
    num_portions: int
    copies_max: int
    portions_per_stage: int
    scalars: _containers.ScalarMap[str, float]
    def __init__(self, sender: _Optional[_Union[_common_pb2.Sender, _Mapping]] = ..., coordinator_epoch: _Optional[int] = ..., num_portions: _Optional[int] = ..., copies_max: _Optional[int] = ..., portions_per_stage: _Optional[int] = ..., scalars: _Optional[_Mapping[str, float]] = ..., **kwargs) -> None: ...

class BeginPassReply(_message.Message):
    __slots__ = ("num_workers",)
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    num_workers: int
    def __init__(self, num_workers: _Optional[int] = ...) -> None: ...

class AwaitPassRequest(_message.Message):
    __slots__ = ("sender", "coordinator_epoch", "wait_milliseconds")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PASS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    sender: _common_pb2.Sender
    coordinator_epoch: int
    wait_milliseconds: int
    def __init__(self, sender: _Optional[_Union[_common_pb2.Sender, _Mapping]] = ..., coordinator_epoch: _Optional[int] = ..., wait_milliseconds: _Optional[int] = ..., **kwargs) -> None: ...

class AwaitPassReply(_message.Message):
    __slots__ = ("complete", "loss_sum", "example_count", "stage_ids", "progress")
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    LOSS_SUM_FIELD_NUMBER: _ClassVar[int]
    EXAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    STAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    complete: bool
    loss_sum: float
    example_count: int
    stage_ids: _containers.RepeatedScalarFieldContainer[int]
    progress: WorkProgress
    def __init__(self, complete: bool = ..., loss_sum: _Optional[float] = ..., example_count: _Optional[int] = ..., stage_ids: _Optional[_Iterable[int]] = ..., progress: _Optional[_Union[WorkProgress, _Mapping]] = ...) -> None: ...

class EndWorkRequest(_message.Message):
    __slots__ = ("sender", "coordinator_epoch", "message")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    sender: _common_pb2.Sender
    coordinator_epoch: int
    message: str
    def __init__(self, sender: _Optional[_Union[_common_pb2.Sender, _Mapping]] = ..., coordinator_epoch: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class EndWorkReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkProgress(_message.Message):
    __slots__ = ("data", "passes_done", "num_portions", "done", "running", "pending", "copies", "stolen", "lost", "wasted", "ended", "workers", "scalars", "deliveries", "ahead")
    class Worker(_message.Message):
        __slots__ = ("worker_id", "done", "running", "examples_per_second")
        WORKER_ID_FIELD_NUMBER: _ClassVar[int]
        DONE_FIELD_NUMBER: _ClassVar[int]
        RUNNING_FIELD_NUMBER: _ClassVar[int]
        EXAMPLES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
        worker_id: str
        done: int
        running: int
        examples_per_second: float
        def __init__(self, worker_id: _Optional[str] = ..., done: _Optional[int] = ..., running: _Optional[int] = ..., examples_per_second: _Optional[float] = ...) -> None: ...
    class Delivery(_message.Message):
        __slots__ = ("portion", "worker_id", "incarnation")
        PASS_FIELD_NUMBER: _ClassVar[int]
        PORTION_FIELD_NUMBER: _ClassVar[int]
        WORKER_ID_FIELD_NUMBER: _ClassVar[int]
        INCARNATION_FIELD_NUMBER: _ClassVar[int]
        portion: Portion
        worker_id: str
        incarnation: int
        def __init__(self, portion: _Optional[_Union[Portion, _Mapping]] = ..., worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., **kwargs) -> None: ...
    class ScalarsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    DATA_FIELD_NUMBER: _ClassVar[int]
    PASS_FIELD_NUMBER: _ClassVar[int]
    PASSES_DONE_FIELD_NUMBER: _ClassVar[int]
    NUM_PORTIONS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    STOLEN_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    WASTED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    SCALARS_FIELD_NUMBER: _ClassVar[int]
    DELIVERIES_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    data: DataSpec
    passes_done: int
    num_portions: int
    done: int
    running: int
    pending: int
    copies: int
    stolen: int
    lost: int
    wasted: int
    ended: bool
    workers: _containers.RepeatedCompositeFieldContainer[WorkProgress.Worker]
    scalars: _containers.ScalarMap[str, float]
    deliveries: _containers.RepeatedCompositeFieldContainer[WorkProgress.Delivery]
    ahead: int
    def __init__(self, data: _Optional[_Union[DataSpec, _Mapping]] = ..., passes_done: _Optional[int] = ..., num_portions: _Optional[int] = ..., done: _Optional[int] = ..., running: _Optional[int] = ..., pending: _Optional[int] = ..., copies: _Optional[int] = ..., stolen: _Optional[int] = ..., lost: _Optional[int] = ..., wasted: _Optional[int] = ..., ended: bool = ..., workers: _Optional[_Iterable[_Union[WorkProgress.Worker, _Mapping]]] = ..., scalars: _Optional[_Mapping[str, float]] = ..., deliveries: _Optional[_Iterable[_Union[WorkProgress.Delivery, _Mapping]]] = ..., ahead: _Optional[int] = ..., **kwargs) -> None: ...

class GetWorkRequest(_message.Message):
    __slots__ = ("deliveries",)
    DELIVERIES_FIELD_NUMBER: _ClassVar[int]
    deliveries: bool
    def __init__(self, deliveries: bool = ...) -> None: ...
