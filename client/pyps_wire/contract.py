"""The wire contract's version, names and default ports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from google.protobuf.message_factory import GetMessageClass

from pyps_wire import inspector_pb2, parameter_server_pb2, standby_pb2, vector_machine_pb2, work_pb2

# Grows when an old client and a new server can no longer understand each other.
PROTOCOL_VERSION = 1

# Abilities of this software, in Hello, so that later software knows which an earlier one lacks.
FEATURES: tuple[str, ...] = (
    "exchange",  # push and pull in one bidirectional stream
    "extents",  # pushes of a part of a shard
    "work",  # portions of a data set, handed out by server 0
    "held_pushes",  # PushRequest.scale_follows
    "vectors",  # instructions on vectors that lie on the servers
)

# Vectors of gradients that a worker may attach: one that is filled, one that is read, and spare ones of either.
GRADIENT_BUFFERS_MAX = 4

DATA_PORT = 7610
CONTROL_PORT = 7611
METRICS_PORT = 7612
LANE_PORT = 7613

PARAMETER_SERVER = "pyps.v1.ParameterServer"
INSPECTOR = "pyps.v1.Inspector"
WORK_QUEUE = "pyps.v1.WorkQueue"
VECTOR_MACHINE = "pyps.v1.VectorMachine"
STANDBY = "pyps.v1.Standby"

# Full gRPC path of every method, by its name: METHODS["Push"] is "/pyps.v1.ParameterServer/Push".
_SERVICES = {
    PARAMETER_SERVER: parameter_server_pb2.DESCRIPTOR.services_by_name["ParameterServer"],
    INSPECTOR: inspector_pb2.DESCRIPTOR.services_by_name["Inspector"],
    WORK_QUEUE: work_pb2.DESCRIPTOR.services_by_name["WorkQueue"],
    VECTOR_MACHINE: vector_machine_pb2.DESCRIPTOR.services_by_name["VectorMachine"],
    STANDBY: standby_pb2.DESCRIPTOR.services_by_name["Standby"],
}
METHODS: dict[str, str] = {
    method.name: f"/{service.full_name}/{method.name}" for service in _SERVICES.values() for method in service.methods
}


def messages_of(service: str) -> dict[str, tuple[Any, Any]]:
    """Return the classes of request and reply of each method of a service."""
    return {
        method.name: (GetMessageClass(method.input_type), GetMessageClass(method.output_type))
        for method in _SERVICES[service].methods
    }


def stub_of(service: str, channel: Any) -> Any:
    """Return an object with a method for each call of a service, as grpcio-tools would generate it."""
    messages, stub = messages_of(service), SimpleNamespace()
    for method in _SERVICES[service].methods:
        request, reply = messages[method.name]
        sends, receives = ("stream" if many else "unary" for many in (method.client_streaming, method.server_streaming))
        call = getattr(channel, f"{sends}_{receives}")
        setattr(stub, method.name, call(METHODS[method.name], request.SerializeToString, reply.FromString))
    return stub
