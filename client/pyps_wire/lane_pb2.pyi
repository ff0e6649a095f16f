from pyps_wire import common_pb2 as _common_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LaneOpen(_message.Message):
    __slots__ = ("sender", "ticket")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    sender: _common_pb2.Sender
    ticket: bytes
    def __init__(self, sender: _Optional[_Union[_common_pb2.Sender, _Mapping]] = ..., ticket: _Optional[bytes] = ...) -> None: ...
