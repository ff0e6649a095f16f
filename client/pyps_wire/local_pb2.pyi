from pyps_wire import common_pb2 as _common_pb2
from pyps_wire import parameter_server_pb2 as _parameter_server_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LocalRequest(_message.Message):
    __slots__ = ("attach", "exchange", "pull")
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    attach: LocalAttach
    exchange: LocalExchange
    pull: LocalPull
    def __init__(self, attach: _Optional[_Union[LocalAttach, _Mapping]] = ..., exchange: _Optional[_Union[LocalExchange, _Mapping]] = ..., pull: _Optional[_Union[LocalPull, _Mapping]] = ...) -> None: ...

class LocalReply(_message.Message):
    __slots__ = ("attached", "exchanged", "pulled", "failure")
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    EXCHANGED_FIELD_NUMBER: _ClassVar[int]
    PULLED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    attached: LocalAttached
    exchanged: LocalExchanged
    pulled: LocalPulled
    failure: LocalFailure
    def __init__(self, attached: _Optional[_Union[LocalAttached, _Mapping]] = ..., exchanged: _Optional[_Union[LocalExchanged, _Mapping]] = ..., pulled: _Optional[_Union[LocalPulled, _Mapping]] = ..., failure: _Optional[_Union[LocalFailure, _Mapping]] = ...) -> None: ...

class LocalVectors(_message.Message):
    __slots__ = ("codec", "offsets")
    CODEC_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    codec: _common_pb2.Codec
    offsets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, codec: _Optional[_Union[_common_pb2.Codec, str]] = ..., offsets: _Optional[_Iterable[int]] = ...) -> None: ...

class LocalAttach(_message.Message):
    __slots__ = ("sender", "ticket", "segment_bytes", "gradients", "parameters")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    sender: _common_pb2.Sender
    ticket: bytes
    segment_bytes: int
    gradients: _containers.RepeatedCompositeFieldContainer[LocalVectors]
    parameters: LocalVectors
    def __init__(self, sender: _Optional[_Union[_common_pb2.Sender, _Mapping]] = ..., ticket: _Optional[bytes] = ..., segment_bytes: _Optional[int] = ..., gradients: _Optional[_Iterable[_Union[LocalVectors, _Mapping]]] = ..., parameters: _Optional[_Union[LocalVectors, _Mapping]] = ...) -> None: ...

class LocalAttached(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    def __init__(self, nonce: _Optional[int] = ...) -> None: ...

class LocalExchange(_message.Message):
    __slots__ = ("shards", "gradients", "pull")
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    shards: _containers.RepeatedCompositeFieldContainer[_parameter_server_pb2.PushRequest]
    gradients: int
    pull: bool
    def __init__(self, shards: _Optional[_Iterable[_Union[_parameter_server_pb2.PushRequest, _Mapping]]] = ..., gradients: _Optional[int] = ..., pull: bool = ...) -> None: ...

class LocalExchanged(_message.Message):
    __slots__ = ("replies",)
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    replies: _containers.RepeatedCompositeFieldContainer[_parameter_server_pb2.ExchangeReply]
    def __init__(self, replies: _Optional[_Iterable[_Union[_parameter_server_pb2.ExchangeReply, _Mapping]]] = ...) -> None: ...

class LocalPull(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: _parameter_server_pb2.PullRequest
    def __init__(self, request: _Optional[_Union[_parameter_server_pb2.PullRequest, _Mapping]] = ...) -> None: ...

class LocalPulled(_message.Message):
    __slots__ = ("shards",)
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    shards: _containers.RepeatedCompositeFieldContainer[_parameter_server_pb2.Parameters]
    def __init__(self, shards: _Optional[_Iterable[_Union[_parameter_server_pb2.Parameters, _Mapping]]] = ...) -> None: ...

class LocalFailure(_message.Message):
    __slots__ = ("status", "name", "details")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    status: str
    name: str
    details: str
    def __init__(self, status: _Optional[str] = ..., name: _Optional[str] = ..., details: _Optional[str] = ...) -> None: ...
