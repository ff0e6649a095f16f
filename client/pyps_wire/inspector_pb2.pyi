from pyps_wire import common_pb2 as _common_pb2
from pyps_wire import work_pb2 as _work_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Status(_message.Message):
    __slots__ = ("software", "instruction_set", "state", "run_id", "epoch", "server_index", "num_servers", "protocol", "staleness", "optimizer", "num_shards", "num_parameters", "model_parameters", "version_min", "version_max", "workers_alive", "tally", "examples", "uptime_seconds", "last_update_seconds", "data_address", "control_address", "metrics_address", "checkpoint", "waiting_for", "warmup", "warming_up", "schedule", "learning_rates", "batch_growth", "batch_size", "clip_norm", "pending_gradients", "pending_bytes", "roster", "workers_missing", "warnings", "schedule_owner", "durable_version", "checkpoint_failure", "standby", "cpu_seconds", "tables")
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTION_SET_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SERVER_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_SERVERS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    MODEL_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    VERSION_MIN_FIELD_NUMBER: _ClassVar[int]
    VERSION_MAX_FIELD_NUMBER: _ClassVar[int]
    WORKERS_ALIVE_FIELD_NUMBER: _ClassVar[int]
    TALLY_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LAST_UPDATE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CONTROL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    WARMUP_FIELD_NUMBER: _ClassVar[int]
    WARMING_UP_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATES_FIELD_NUMBER: _ClassVar[int]
    BATCH_GROWTH_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    CLIP_NORM_FIELD_NUMBER: _ClassVar[int]
    PENDING_GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    PENDING_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    WORKERS_MISSING_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_OWNER_FIELD_NUMBER: _ClassVar[int]
    DURABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FAILURE_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    CPU_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    software: str
    instruction_set: str
    state: _common_pb2.RunState
    run_id: str
    epoch: int
    server_index: int
    num_servers: int
    protocol: str
    staleness: str
    optimizer: _common_pb2.OptimizerSettings
    num_shards: int
    num_parameters: int
    model_parameters: int
    version_min: int
    version_max: int
    workers_alive: int
    tally: Tally
    examples: int
    uptime_seconds: float
    last_update_seconds: float
    data_address: str
    control_address: str
    metrics_address: str
    checkpoint: str
    waiting_for: _containers.RepeatedScalarFieldContainer[str]
    warmup: str
    warming_up: bool
    schedule: str
    learning_rates: _containers.RepeatedCompositeFieldContainer[LearningRate]
    batch_growth: str
    batch_size: int
    clip_norm: float
    pending_gradients: int
    pending_bytes: int
    roster: _containers.RepeatedScalarFieldContainer[str]
    workers_missing: int
    warnings: _containers.RepeatedScalarFieldContainer[str]
    schedule_owner: str
    durable_version: int
    checkpoint_failure: str
    standby: str
    cpu_seconds: float
    tables: _containers.RepeatedCompositeFieldContainer[TableInfo]
    def __init__(self, software: _Optional[str] = ..., instruction_set: _Optional[str] = ..., state: _Optional[_Union[_common_pb2.RunState, str]] = ..., run_id: _Optional[str] = ..., epoch: _Optional[int] = ..., server_index: _Optional[int] = ..., num_servers: _Optional[int] = ..., protocol: _Optional[str] = ..., staleness: _Optional[str] = ..., optimizer: _Optional[_Union[_common_pb2.OptimizerSettings, _Mapping]] = ..., num_shards: _Optional[int] = ..., num_parameters: _Optional[int] = ..., model_parameters: _Optional[int] = ..., version_min: _Optional[int] = ..., version_max: _Optional[int] = ..., workers_alive: _Optional[int] = ..., tally: _Optional[_Union[Tally, _Mapping]] = ..., examples: _Optional[int] = ..., uptime_seconds: _Optional[float] = ..., last_update_seconds: _Optional[float] = ..., data_address: _Optional[str] = ..., control_address: _Optional[str] = ..., metrics_address: _Optional[str] = ..., checkpoint: _Optional[str] = ..., waiting_for: _Optional[_Iterable[str]] = ..., warmup: _Optional[str] = ..., warming_up: bool = ..., schedule: _Optional[str] = ..., learning_rates: _Optional[_Iterable[_Union[LearningRate, _Mapping]]] = ..., batch_growth: _Optional[str] = ..., batch_size: _Optional[int] = ..., clip_norm: _Optional[float] = ..., pending_gradients: _Optional[int] = ..., pending_bytes: _Optional[int] = ..., roster: _Optional[_Iterable[str]] = ..., workers_missing: _Optional[int] = ..., warnings: _Optional[_Iterable[str]] = ..., schedule_owner: _Optional[str] = ..., durable_version: _Optional[int] = ..., checkpoint_failure: _Optional[str] = ..., standby: _Optional[str] = ..., cpu_seconds: _Optional[float] = ..., tables: _Optional[_Iterable[_Union[TableInfo, _Mapping]]] = ...) -> None: ...

class Tally(_message.Message):
    __slots__ = ("pushes_applied", "pushes_pending", "pushes_rejected", "pushes_duplicate", "pushes_dropped", "rejected_by_reason", "updates", "staleness_mean", "staleness_max", "rate_scale_mean", "step_lost", "rate_scale_count", "blocked_seconds", "bytes_in", "bytes_out")
    class RejectedByReasonEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    PUSHES_APPLIED_FIELD_NUMBER: _ClassVar[int]
    PUSHES_PENDING_FIELD_NUMBER: _ClassVar[int]
    PUSHES_REJECTED_FIELD_NUMBER: _ClassVar[int]
    PUSHES_DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    PUSHES_DROPPED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_BY_REASON_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    STALENESS_MEAN_FIELD_NUMBER: _ClassVar[int]
    STALENESS_MAX_FIELD_NUMBER: _ClassVar[int]
    RATE_SCALE_MEAN_FIELD_NUMBER: _ClassVar[int]
    STEP_LOST_FIELD_NUMBER: _ClassVar[int]
    RATE_SCALE_COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOCKED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_IN_FIELD_NUMBER: _ClassVar[int]
    BYTES_OUT_FIELD_NUMBER: _ClassVar[int]
    pushes_applied: int
    pushes_pending: int
    pushes_rejected: int
    pushes_duplicate: int
    pushes_dropped: int
    rejected_by_reason: _containers.ScalarMap[str, int]
    updates: int
    staleness_mean: float
    staleness_max: int
    rate_scale_mean: float
    step_lost: float
    rate_scale_count: int
    blocked_seconds: float
    bytes_in: int
    bytes_out: int
    def __init__(self, pushes_applied: _Optional[int] = ..., pushes_pending: _Optional[int] = ..., pushes_rejected: _Optional[int] = ..., pushes_duplicate: _Optional[int] = ..., pushes_dropped: _Optional[int] = ..., rejected_by_reason: _Optional[_Mapping[str, int]] = ..., updates: _Optional[int] = ..., staleness_mean: _Optional[float] = ..., staleness_max: _Optional[int] = ..., rate_scale_mean: _Optional[float] = ..., step_lost: _Optional[float] = ..., rate_scale_count: _Optional[int] = ..., blocked_seconds: _Optional[float] = ..., bytes_in: _Optional[int] = ..., bytes_out: _Optional[int] = ...) -> None: ...

class LearningRate(_message.Message):
    __slots__ = ("group", "base", "current")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    CURRENT_FIELD_NUMBER: _ClassVar[int]
    group: int
    base: float
    current: float
    def __init__(self, group: _Optional[int] = ..., base: _Optional[float] = ..., current: _Optional[float] = ...) -> None: ...

class ListShardsRequest(_message.Message):
    __slots__ = ("without_checksums",)
    WITHOUT_CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    without_checksums: bool
    def __init__(self, without_checksums: bool = ...) -> None: ...

class TableInfo(_message.Message):
    __slots__ = ("name", "rows", "candidates", "bytes", "admitted", "dropped", "evicted", "expired", "lookups", "hits")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    name: str
    rows: int
    candidates: int
    bytes: int
    admitted: int
    dropped: int
    evicted: int
    expired: int
    lookups: int
    hits: int
    def __init__(self, name: _Optional[str] = ..., rows: _Optional[int] = ..., candidates: _Optional[int] = ..., bytes: _Optional[int] = ..., admitted: _Optional[int] = ..., dropped: _Optional[int] = ..., evicted: _Optional[int] = ..., expired: _Optional[int] = ..., lookups: _Optional[int] = ..., hits: _Optional[int] = ...) -> None: ...

class ShardInfo(_message.Message):
    __slots__ = ("shard_id", "group", "offset", "num_parameters", "version", "checksum", "bytes", "tally", "pending_gradients", "pending_bytes", "waiting_for", "learning_rate", "examples", "part", "num_workers", "standby", "table")
    SHARD_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TALLY_FIELD_NUMBER: _ClassVar[int]
    PENDING_GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    PENDING_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    shard_id: int
    group: int
    offset: int
    num_parameters: int
    version: int
    checksum: str
    bytes: int
    tally: Tally
    pending_gradients: int
    pending_bytes: int
    waiting_for: _containers.RepeatedScalarFieldContainer[str]
    learning_rate: float
    examples: int
    part: int
    num_workers: int
    standby: str
    table: TableInfo
    def __init__(self, shard_id: _Optional[int] = ..., group: _Optional[int] = ..., offset: _Optional[int] = ..., num_parameters: _Optional[int] = ..., version: _Optional[int] = ..., checksum: _Optional[str] = ..., bytes: _Optional[int] = ..., tally: _Optional[_Union[Tally, _Mapping]] = ..., pending_gradients: _Optional[int] = ..., pending_bytes: _Optional[int] = ..., waiting_for: _Optional[_Iterable[str]] = ..., learning_rate: _Optional[float] = ..., examples: _Optional[int] = ..., part: _Optional[int] = ..., num_workers: _Optional[int] = ..., standby: _Optional[str] = ..., table: _Optional[_Union[TableInfo, _Mapping]] = ...) -> None: ...

class ListShardsReply(_message.Message):
    __slots__ = ("shards",)
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    shards: _containers.RepeatedCompositeFieldContainer[ShardInfo]
    def __init__(self, shards: _Optional[_Iterable[_Union[ShardInfo, _Mapping]]] = ...) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("worker_id", "state", "incarnation", "host", "process_id", "device", "software", "clock", "tally", "silent_seconds", "scalars", "message", "counts", "waits_for", "transport", "replica", "parts", "shards_pushed", "shards_pulled", "gradient_codec", "parameter_codec", "standby")
    class ScalarsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    TALLY_FIELD_NUMBER: _ClassVar[int]
    SILENT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SCALARS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_PUSHED_FIELD_NUMBER: _ClassVar[int]
    SHARDS_PULLED_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_CODEC_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_CODEC_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    state: str
    incarnation: int
    host: str
    process_id: int
    device: str
    software: str
    clock: int
    tally: Tally
    silent_seconds: float
    scalars: _containers.ScalarMap[str, float]
    message: str
    counts: bool
    waits_for: _containers.RepeatedScalarFieldContainer[str]
    transport: str
    replica: str
    parts: _containers.RepeatedScalarFieldContainer[int]
    shards_pushed: _containers.RepeatedScalarFieldContainer[int]
    shards_pulled: _containers.RepeatedScalarFieldContainer[int]
    gradient_codec: str
    parameter_codec: str
    standby: str
    def __init__(self, worker_id: _Optional[str] = ..., state: _Optional[str] = ..., incarnation: _Optional[int] = ..., host: _Optional[str] = ..., process_id: _Optional[int] = ..., device: _Optional[str] = ..., software: _Optional[str] = ..., clock: _Optional[int] = ..., tally: _Optional[_Union[Tally, _Mapping]] = ..., silent_seconds: _Optional[float] = ..., scalars: _Optional[_Mapping[str, float]] = ..., message: _Optional[str] = ..., counts: bool = ..., waits_for: _Optional[_Iterable[str]] = ..., transport: _Optional[str] = ..., replica: _Optional[str] = ..., parts: _Optional[_Iterable[int]] = ..., shards_pushed: _Optional[_Iterable[int]] = ..., shards_pulled: _Optional[_Iterable[int]] = ..., gradient_codec: _Optional[str] = ..., parameter_codec: _Optional[str] = ..., standby: _Optional[str] = ...) -> None: ...

class ListWorkersReply(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerInfo]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerInfo, _Mapping]]] = ...) -> None: ...

class ListTensorsRequest(_message.Message):
    __slots__ = ("name_prefix", "page_size", "page_token")
    NAME_PREFIX_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    name_prefix: str
    page_size: int
    page_token: str
    def __init__(self, name_prefix: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class TensorInfo(_message.Message):
    __slots__ = ("name", "shape", "group", "held_parameters", "version_min", "version_max", "norm", "min", "max", "first_values", "whole_shape", "offset", "part")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    HELD_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    VERSION_MIN_FIELD_NUMBER: _ClassVar[int]
    VERSION_MAX_FIELD_NUMBER: _ClassVar[int]
    NORM_FIELD_NUMBER: _ClassVar[int]
    MIN_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    FIRST_VALUES_FIELD_NUMBER: _ClassVar[int]
    WHOLE_SHAPE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    group: int
    held_parameters: int
    version_min: int
    version_max: int
    norm: float
    min: float
    max: float
    first_values: _containers.RepeatedScalarFieldContainer[float]
    whole_shape: _containers.RepeatedScalarFieldContainer[int]
    offset: _containers.RepeatedScalarFieldContainer[int]
    part: int
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., group: _Optional[int] = ..., held_parameters: _Optional[int] = ..., version_min: _Optional[int] = ..., version_max: _Optional[int] = ..., norm: _Optional[float] = ..., min: _Optional[float] = ..., max: _Optional[float] = ..., first_values: _Optional[_Iterable[float]] = ..., whole_shape: _Optional[_Iterable[int]] = ..., offset: _Optional[_Iterable[int]] = ..., part: _Optional[int] = ...) -> None: ...

class ListTensorsReply(_message.Message):
    __slots__ = ("tensors", "next_page_token")
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[TensorInfo]
    next_page_token: str
    def __init__(self, tensors: _Optional[_Iterable[_Union[TensorInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class GetStalenessRequest(_message.Message):
    __slots__ = ("worker_id", "shard_id")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    shard_id: int
    def __init__(self, worker_id: _Optional[str] = ..., shard_id: _Optional[int] = ...) -> None: ...

class StalenessHistogram(_message.Message):
    __slots__ = ("buckets", "tally", "standby")
    class Bucket(_message.Message):
        __slots__ = ("staleness", "count")
        STALENESS_FIELD_NUMBER: _ClassVar[int]
        COUNT_FIELD_NUMBER: _ClassVar[int]
        staleness: int
        count: int
        def __init__(self, staleness: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    TALLY_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    buckets: _containers.RepeatedCompositeFieldContainer[StalenessHistogram.Bucket]
    tally: Tally
    standby: str
    def __init__(self, buckets: _Optional[_Iterable[_Union[StalenessHistogram.Bucket, _Mapping]]] = ..., tally: _Optional[_Union[Tally, _Mapping]] = ..., standby: _Optional[str] = ...) -> None: ...

class ListReceiptsRequest(_message.Message):
    __slots__ = ("limit", "worker_id")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    limit: int
    worker_id: str
    def __init__(self, limit: _Optional[int] = ..., worker_id: _Optional[str] = ...) -> None: ...

class LoggedReceipt(_message.Message):
    __slots__ = ("worker_id", "receipt", "age_seconds")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    receipt: _common_pb2.Receipt
    age_seconds: float
    def __init__(self, worker_id: _Optional[str] = ..., receipt: _Optional[_Union[_common_pb2.Receipt, _Mapping]] = ..., age_seconds: _Optional[float] = ...) -> None: ...

class ListReceiptsReply(_message.Message):
    __slots__ = ("receipts",)
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    receipts: _containers.RepeatedCompositeFieldContainer[LoggedReceipt]
    def __init__(self, receipts: _Optional[_Iterable[_Union[LoggedReceipt, _Mapping]]] = ...) -> None: ...

class ListEventsRequest(_message.Message):
    __slots__ = ("after", "limit")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    after: int
    limit: int
    def __init__(self, after: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("number", "age_seconds", "kind", "message", "worker")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    number: int
    age_seconds: float
    kind: str
    message: str
    worker: str
    def __init__(self, number: _Optional[int] = ..., age_seconds: _Optional[float] = ..., kind: _Optional[str] = ..., message: _Optional[str] = ..., worker: _Optional[str] = ...) -> None: ...

class ListEventsReply(_message.Message):
    __slots__ = ("events", "newest", "forgotten")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    newest: int
    forgotten: int
    def __init__(self, events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., newest: _Optional[int] = ..., forgotten: _Optional[int] = ...) -> None: ...

class ListActivityRequest(_message.Message):
    __slots__ = ("after", "limit")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    after: int
    limit: int
    def __init__(self, after: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class Activity(_message.Message):
    __slots__ = ("number", "worker_id", "age_seconds", "seconds", "sequence", "outcome", "reason", "staleness", "updates", "waited_for")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    WAITED_FOR_FIELD_NUMBER: _ClassVar[int]
    number: int
    worker_id: str
    age_seconds: float
    seconds: float
    sequence: int
    outcome: _common_pb2.Outcome
    reason: _common_pb2.Reason
    staleness: int
    updates: int
    waited_for: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, number: _Optional[int] = ..., worker_id: _Optional[str] = ..., age_seconds: _Optional[float] = ..., seconds: _Optional[float] = ..., sequence: _Optional[int] = ..., outcome: _Optional[_Union[_common_pb2.Outcome, str]] = ..., reason: _Optional[_Union[_common_pb2.Reason, str]] = ..., staleness: _Optional[int] = ..., updates: _Optional[int] = ..., waited_for: _Optional[_Iterable[str]] = ...) -> None: ...

class ListActivityReply(_message.Message):
    __slots__ = ("activities", "newest", "forgotten")
    ACTIVITIES_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    activities: _containers.RepeatedCompositeFieldContainer[Activity]
    newest: int
    forgotten: int
    def __init__(self, activities: _Optional[_Iterable[_Union[Activity, _Mapping]]] = ..., newest: _Optional[int] = ..., forgotten: _Optional[int] = ...) -> None: ...

class GetMemoryRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Memory(_message.Message):
    __slots__ = ("parameters_bytes", "slots_bytes", "in_flight_bytes", "in_flight_bytes_max", "ledger_entries", "resident_bytes", "pending_bytes", "shared_bytes", "first_parameters_bytes", "ledger_bytes", "serialized_bytes", "late_messages", "published_bytes", "positions_bytes")
    PARAMETERS_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    LEDGER_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PENDING_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FIRST_PARAMETERS_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEDGER_BYTES_FIELD_NUMBER: _ClassVar[int]
    SERIALIZED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LATE_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_BYTES_FIELD_NUMBER: _ClassVar[int]
    parameters_bytes: int
    slots_bytes: int
    in_flight_bytes: int
    in_flight_bytes_max: int
    ledger_entries: int
    resident_bytes: int
    pending_bytes: int
    shared_bytes: int
    first_parameters_bytes: int
    ledger_bytes: int
    serialized_bytes: int
    late_messages: int
    published_bytes: int
    positions_bytes: int
    def __init__(self, parameters_bytes: _Optional[int] = ..., slots_bytes: _Optional[int] = ..., in_flight_bytes: _Optional[int] = ..., in_flight_bytes_max: _Optional[int] = ..., ledger_entries: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., pending_bytes: _Optional[int] = ..., shared_bytes: _Optional[int] = ..., first_parameters_bytes: _Optional[int] = ..., ledger_bytes: _Optional[int] = ..., serialized_bytes: _Optional[int] = ..., late_messages: _Optional[int] = ..., published_bytes: _Optional[int] = ..., positions_bytes: _Optional[int] = ...) -> None: ...

class ConfigureRequest(_message.Message):
    __slots__ = ("protocol", "staleness", "learning_rate", "schedule", "expected_workers", "validate_only")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_WORKERS_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    protocol: str
    staleness: str
    learning_rate: float
    schedule: str
    expected_workers: int
    validate_only: bool
    def __init__(self, protocol: _Optional[str] = ..., staleness: _Optional[str] = ..., learning_rate: _Optional[float] = ..., schedule: _Optional[str] = ..., expected_workers: _Optional[int] = ..., validate_only: bool = ...) -> None: ...

class ConfigureReply(_message.Message):
    __slots__ = ("protocol", "staleness", "schedule", "learning_rates", "gradients_settled", "updates_made", "warnings")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATES_FIELD_NUMBER: _ClassVar[int]
    GRADIENTS_SETTLED_FIELD_NUMBER: _ClassVar[int]
    UPDATES_MADE_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    protocol: str
    staleness: str
    schedule: str
    learning_rates: _containers.RepeatedCompositeFieldContainer[LearningRate]
    gradients_settled: int
    updates_made: int
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol: _Optional[str] = ..., staleness: _Optional[str] = ..., schedule: _Optional[str] = ..., learning_rates: _Optional[_Iterable[_Union[LearningRate, _Mapping]]] = ..., gradients_settled: _Optional[int] = ..., updates_made: _Optional[int] = ..., warnings: _Optional[_Iterable[str]] = ...) -> None: ...

class SaveCheckpointRequest(_message.Message):
    __slots__ = ("validate_only",)
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    validate_only: bool
    def __init__(self, validate_only: bool = ...) -> None: ...

class SaveCheckpointReply(_message.Message):
    __slots__ = ("path", "bytes", "seconds")
    PATH_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    path: str
    bytes: int
    seconds: float
    def __init__(self, path: _Optional[str] = ..., bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class ResetRequest(_message.Message):
    __slots__ = ("run_id", "validate_only")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    validate_only: bool
    def __init__(self, run_id: _Optional[str] = ..., validate_only: bool = ...) -> None: ...

class ResetReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ("validate_only",)
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    validate_only: bool
    def __init__(self, validate_only: bool = ...) -> None: ...

class StopReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PromoteRequest(_message.Message):
    __slots__ = ("validate_only",)
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    validate_only: bool
    def __init__(self, validate_only: bool = ...) -> None: ...

class PromoteReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("validate_only",)
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    validate_only: bool
    def __init__(self, validate_only: bool = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("standby",)
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    standby: str
    def __init__(self, standby: _Optional[str] = ...) -> None: ...
