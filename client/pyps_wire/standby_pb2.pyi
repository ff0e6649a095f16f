from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FollowRequest(_message.Message):
    __slots__ = ("address", "lease_seconds", "begin", "received", "again", "take_over", "leaves")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    TAKE_OVER_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    address: str
    lease_seconds: float
    begin: bool
    received: int
    again: _containers.RepeatedScalarFieldContainer[int]
    take_over: bool
    leaves: bool
    def __init__(self, address: _Optional[str] = ..., lease_seconds: _Optional[float] = ..., begin: bool = ..., received: _Optional[int] = ..., again: _Optional[_Iterable[int]] = ..., take_over: bool = ..., leaves: bool = ...) -> None: ...

class FollowReply(_message.Message):
    __slots__ = ("life", "events", "payload")
    LIFE_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    life: str
    events: _containers.RepeatedCompositeFieldContainer[FollowEvent]
    payload: bytes
    def __init__(self, life: _Optional[str] = ..., events: _Optional[_Iterable[_Union[FollowEvent, _Mapping]]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class FollowEvent(_message.Message):
    __slots__ = ("line", "payload_bytes")
    LINE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    line: str
    payload_bytes: int
    def __init__(self, line: _Optional[str] = ..., payload_bytes: _Optional[int] = ...) -> None: ...

class MeetRequest(_message.Message):
    __slots__ = ("run_id", "epoch", "has_taken_over", "address", "noted_run_id", "followed_epoch")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HAS_TAKEN_OVER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NOTED_RUN_ID_FIELD_NUMBER: _ClassVar[int]
    FOLLOWED_EPOCH_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    epoch: int
    has_taken_over: bool
    address: str
    noted_run_id: str
    followed_epoch: int
    def __init__(self, run_id: _Optional[str] = ..., epoch: _Optional[int] = ..., has_taken_over: bool = ..., address: _Optional[str] = ..., noted_run_id: _Optional[str] = ..., followed_epoch: _Optional[int] = ...) -> None: ...

class MeetReply(_message.Message):
    __slots__ = ("has_taken_over", "epoch")
    HAS_TAKEN_OVER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    has_taken_over: bool
    epoch: int
    def __init__(self, has_taken_over: bool = ..., epoch: _Optional[int] = ...) -> None: ...
