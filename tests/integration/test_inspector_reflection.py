"""The control port without generated classes: every call through reflection alone, by both names, and by grpcurl."""

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.json_format import MessageToDict, ParseDict
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from pyps_wire.contract import WORK_QUEUE, stub_of
from pyps_wire.work_pb2 import DataSpec, OpenWorkRequest
from support import DEADLINE_SECONDS, AnyServer, Start, connected
from wire_worker import WireWorker

INSPECTOR = "pyps.v1.Inspector"
# The calls of the service with a request each, the ones that end things last, and a field of each answer.
CALLS: Mapping[str, tuple[dict[str, Any], str | None]] = {
    "GetStatus": ({}, "software"),
    "ListShards": ({}, "shards"),
    "ListWorkers": ({}, "workers"),
    "ListTensors": ({"namePrefix": "layer", "pageSize": 1}, "nextPageToken"),
    "GetStaleness": ({"workerId": "a"}, "buckets"),
    "ListReceipts": ({"limit": 5}, "receipts"),
    "ListEvents": ({"limit": 5}, "newest"),
    "ListActivity": ({"limit": 5}, None),
    "GetWork": ({"deliveries": True}, "numPortions"),
    "GetMemory": ({}, "residentBytes"),
    "Configure": ({"learningRate": 0.5}, "schedule"),
    "SaveCheckpoint": ({}, "path"),
    "Stop": ({}, None),
    "Reset": ({"runId": "run-1"}, None),
}


@pytest.fixture
def server(start_server: Start, tmp_path: Path) -> AnyServer:
    started = start_server("--checkpoint-dir", str(tmp_path / "checkpoints"))
    begin_run(started)
    return started


def begin_run(server: AnyServer) -> None:
    with WireWorker(server.data) as worker:
        worker.join()
        worker.push(worker.push_request(1.0))
        data = DataSpec(num_examples=4, portion_examples=2)
        stub_of(WORK_QUEUE, worker.channel).Open(
            OpenWorkRequest(sender=worker.sender, data=data), timeout=DEADLINE_SECONDS
        )


def test_every_call_works_without_generated_classes(server):
    for version in ("v1", "v1alpha"):
        with connected(server.control) as channel:
            services = set(ReflectionDatabase(channel, version=version).get_services())
            inspector = Reflected(channel, INSPECTOR, version=version)
            # The last two need a standby.
            assert set(inspector.service.methods_by_name) == {*CALLS, "Promote", "Drain"}
            if inspector.call("GetStatus")["state"] == "RUN_STATE_EMPTY":
                begin_run(server)
            for method, (request, field) in CALLS.items():
                answer = inspector.call(method, request)
                assert field is None or answer[field], f"{version}: {method} gave {answer}"
            assert inspector.call("GetStatus")["state"] == "RUN_STATE_EMPTY", version
        reflection = {"grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"}
        assert services == {INSPECTOR, "grpc.health.v1.Health", "grpc.channelz.v1.Channelz", *reflection}, version


def test_every_field_is_served_with_the_name_that_it_has_in_json(server):
    """grpcurl prints the names of the descriptors that a server gives it, and makes none up."""
    names: set[str] = set()
    with connected(server.control) as channel:
        for version in ("v1", "v1alpha"):
            database = ReflectionDatabase(channel, version=version)
            for symbol in (INSPECTOR, "pyps.v1.WorkProgress", "grpc.health.v1.HealthCheckResponse"):
                known = descriptor_pool.Default().FindFileContainingSymbol(symbol).message_types_by_name
                for message in database.FindFileContainingSymbol(symbol).message_type:
                    served = {field.name: field.json_name for field in message.field}
                    # What protobuf itself makes of the names.
                    expected = {field.name: field.camelcase_name for field in known[message.name].fields}
                    assert served == expected, f"{message.name} by {version}"
                    names |= set(served.values())
    assert {"nextPageToken", "learningRates", "numPortions", "status"} <= names


@pytest.mark.skipif(shutil.which("grpcurl") is None, reason="grpcurl is not on the PATH")
def test_grpcurl_makes_the_same_calls(server):
    def run(*arguments: str) -> str:
        done = subprocess.run(["grpcurl", "-plaintext", *arguments], capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert INSPECTOR in run(server.control, "list").split()
    assert "rpc GetStatus" in run(server.control, "describe", INSPECTOR)
    for method, (request, field) in CALLS.items():
        answer = json.loads(run("-d", json.dumps(request), server.control, f"{INSPECTOR}/{method}"))
        assert field is None or answer[field], f"{method} gave {answer}"


class Reflected:
    """A service known from the server's reflection alone: methods by name, JSON in, JSON out, as with grpcurl."""

    def __init__(self, channel: grpc.Channel, service: str, *, version: str):
        self._channel = channel
        self.database = ReflectionDatabase(channel, version=version)
        self._pool = descriptor_pool.DescriptorPool(self.database)
        self.service = self._pool.FindServiceByName(service)

    def call(self, method: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
        described = self.service.methods_by_name[method]
        request_type = message_factory.GetMessageClass(described.input_type)
        reply_type = message_factory.GetMessageClass(described.output_type)
        call = self._channel.unary_unary(
            f"/{self.service.full_name}/{method}",
            request_serializer=request_type.SerializeToString,
            response_deserializer=reply_type.FromString,
        )
        reply = call(ParseDict(request or {}, request_type()), timeout=DEADLINE_SECONDS)
        return MessageToDict(reply)


class ReflectionDatabase(ProtoReflectionDescriptorDatabase):
    """Descriptors from a server's reflection service of the given version, "v1" or "v1alpha"."""

    def __init__(self, channel: grpc.Channel, *, version: str):
        super().__init__(channel)
        self._stub = SimpleNamespace(
            ServerReflectionInfo=channel.stream_stream(
                f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
                request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )
        )
