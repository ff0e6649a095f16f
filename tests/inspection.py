"""What tests ask a server's control port: through the generated stubs, by `pyps` commands, and through reflection."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any
from unittest import mock

import grpc
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.json_format import MessageToDict, ParseDict
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from pyps.cli.main import app
from pyps_wire import inspector_pb2 as pb
from pyps_wire.inspector_pb2_grpc import InspectorStub

CALL_SECONDS = 20.0


@contextmanager
def connected(address: str) -> Iterator[grpc.Channel]:
    """A channel of the test's own to that address."""
    options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(address, options=options) as channel:
        yield channel


def inspect(address: str, method: str, request: Any = None) -> Any:
    """Calls Inspector through its generated stub; the request is empty unless given."""
    request = request if request is not None else getattr(pb, f"{method}Request")()
    with connected(address) as channel:
        return getattr(InspectorStub(channel), method)(request, timeout=CALL_SECONDS)


def checksums(address: str) -> dict[int, tuple[int, str]]:
    """Version and checksum of each shard on the server."""
    shards = inspect(address, "ListShards").shards
    return {shard.shard_id: (shard.version, shard.checksum) for shard in shards}


def shell(*arguments: str, status: int = 0, **environment: str) -> str:
    """Runs a `pyps` command in this process: what it printed, once it has ended with that status.

    Not `pyps bench` and what else changes its process, which ignores Ctrl-C at its end.
    """
    output, ended = io.StringIO(), 0
    with mock.patch.dict(os.environ, environment), redirect_stdout(output), redirect_stderr(output):
        try:
            app(list(arguments), prog_name="pyps")
        except SystemExit as ending:
            ended = ending.code or 0
    assert ended == status, output.getvalue()
    assert "Traceback" not in output.getvalue()
    return output.getvalue()


class Reflected:
    """A service known from the server's reflection alone: methods by name, JSON in, JSON out, as with grpcurl."""

    def __init__(self, channel: grpc.Channel, service: str, *, version: str):
        self._channel = channel
        self.database = ReflectionDatabase(channel, version=version)
        self._pool = descriptor_pool.DescriptorPool(self.database)
        self.service = self._pool.FindServiceByName(service)

    def call(self, method: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
        """Makes a call."""
        described = self.service.methods_by_name[method]
        request_type = message_factory.GetMessageClass(described.input_type)
        reply_type = message_factory.GetMessageClass(described.output_type)
        call = self._channel.unary_unary(
            f"/{self.service.full_name}/{method}",
            request_serializer=request_type.SerializeToString,
            response_deserializer=reply_type.FromString,
        )
        reply = call(ParseDict(request or {}, request_type()), timeout=CALL_SECONDS)
        return MessageToDict(reply)


class ReflectionDatabase(ProtoReflectionDescriptorDatabase):
    """Descriptors from a server's reflection service of the given version, "v1" or "v1alpha"."""

    def __init__(self, channel: grpc.Channel, *, version: str):
        super().__init__(channel)
        self._stub = _ReflectionStub(channel, version)


class _ReflectionStub:
    def __init__(self, channel: grpc.Channel, version: str):
        self.ServerReflectionInfo = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
