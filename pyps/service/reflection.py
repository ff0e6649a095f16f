"""Reflection under both of its names: grpcurl tries v1, then v1alpha; other tools know only one.

Python's package serves v1alpha. The messages of v1 are the same bytes, so its servicer answers both; only the
descriptors of v1 are made here, by renaming. Generated code has no JSON names of fields, so they are added to the
answers: without them grpcurl writes `page_token`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import reflection, reflection_pb2

from pyps.service.calls import Call

ALPHA = reflection.SERVICE_NAME
V1 = ALPHA.replace("v1alpha", "v1")


def add_reflection(server: grpc.aio.Server, services: Sequence[str]) -> None:
    """Add reflection of these services, and of itself, to a server."""
    _describe_v1()
    names = [*services, ALPHA, V1]
    servicer: Any = reflection.aio.ReflectionServicer(names)

    async def answer(requests: Any, context: Call) -> None:
        async for reply in servicer.ServerReflectionInfo(requests, context):
            await context.write(reply)

    handler = grpc.stream_stream_rpc_method_handler(
        answer,
        request_deserializer=_question,
        response_serializer=_with_json_names,
    )
    server.add_generic_rpc_handlers(
        tuple(grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler}) for name in (ALPHA, V1))
    )


def _question(message: bytes) -> reflection_pb2.ServerReflectionRequest:
    """Read a question; return an empty one for invalid bytes, which is answered with INVALID_ARGUMENT."""
    try:
        return reflection_pb2.ServerReflectionRequest.FromString(message)
    except DecodeError:
        return reflection_pb2.ServerReflectionRequest()


def _with_json_names(response: Any) -> bytes:
    """Serialise an answer, with the JSON name of every field in its files."""
    files = response.file_descriptor_response.file_descriptor_proto
    for index, serialized in enumerate(files):
        file = descriptor_pb2.FileDescriptorProto.FromString(serialized)
        _name_fields(file)
        files[index] = file.SerializeToString()
    return bytes(response.SerializeToString())


def _name_fields(scope: Any) -> None:
    """Give each field its JSON name, by protoc's rule: every _ goes, and the letter after it is a capital."""
    is_file = isinstance(scope, descriptor_pb2.FileDescriptorProto)
    for field in (*scope.extension, *(() if is_file else scope.field)):
        if not field.json_name:
            first, *others = field.name.split("_")
            field.json_name = first + "".join(word[:1].upper() + word[1:] for word in others)
    for message in scope.message_type if is_file else scope.nested_type:
        _name_fields(message)


def _describe_v1() -> None:
    pool = descriptor_pool.Default()
    try:
        pool.FindServiceByName(V1)
    except KeyError:
        file = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(file)
        pool.Add(text_format.Parse(str(file).replace("v1alpha", "v1"), descriptor_pb2.FileDescriptorProto()))
