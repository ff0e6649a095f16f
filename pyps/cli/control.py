"""Talking to a server from the command line: one call, one answer or one clear error."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, NoReturn

import grpc
import typer

from pyps import __version__
from pyps_client import Observer, launch
from pyps_client.launch import parse_servers
from pyps_wire.common_pb2 import ROLE_OBSERVER, Sender
from pyps_wire.contract import CONTROL_PORT, PROTOCOL_VERSION
from pyps_wire.errors import (
    METADATA_KEY,
    NotInitialized,
    ProtocolMismatch,
    PypsError,
    ServerUnavailable,
    WaitTimedOut,
    from_status,
)
from pyps_wire.inspector_pb2 import GetStatusRequest, WorkerInfo
from pyps_wire.inspector_pb2_grpc import InspectorStub
from pyps_wire.parameter_server_pb2 import HelloReply, HelloRequest, LeaveRequest
from pyps_wire.parameter_server_pb2_grpc import ParameterServerStub

TIMEOUT_SECONDS = 10.0
# A checkpoint of a large model takes its time.
SAVE_TIMEOUT_SECONDS = 600.0

# Either port of a server leads to the other, so that one list of servers does for every command.
SERVERS_HELP = "Addresses of all servers, in order, separated by commas: of each its data or its control port."
TOKEN_HELP = "File with the servers' token."

# The option of commands that talk to control ports, and of those that talk to data ports.
Servers = Annotated[str, typer.Option(help=SERVERS_HELP, envvar=["PYPS_CONTROL", "PYPS_SERVERS"])]
DataServers = Annotated[str, typer.Option(help=SERVERS_HELP, envvar=["PYPS_SERVERS", "PYPS_CONTROL"])]


class Control:
    """A connection to one server's control port, which is asked for at the data port where that one was named."""

    def __init__(self, address: str, *, token: str):
        # As named; the control port's once a call has found it.
        self.address = address
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._channel = _open(address)

    def call(self, method: str, request: Any, *, timeout_seconds: float = TIMEOUT_SECONDS) -> Any:
        """Makes a call of the Inspector service; raises PypsError in the server's own words."""
        try:
            return self._call(InspectorStub, method, request, timeout_seconds)
        except ProtocolMismatch:
            self._move(_same_host(self.address, self.hello().control_address))
        return self._call(InspectorStub, method, request, timeout_seconds)

    def hello(self) -> HelloReply:
        """What the server tells an observer at its data port; ProtocolMismatch where another one was named."""
        request = HelloRequest(protocol_version=PROTOCOL_VERSION, software=f"pyps {__version__}", role=ROLE_OBSERVER)
        reply: HelloReply = self._call(ParameterServerStub, "Hello", request, TIMEOUT_SECONDS)
        return reply

    def data_address(self) -> str:
        """The server's data address."""
        try:
            self.hello()
        except ProtocolMismatch:
            return _same_host(self.address, self.call("GetStatus", GetStatusRequest()).data_address)
        return self.address

    def take_off(self, worker: WorkerInfo, run_id: str, *, timeout_seconds: float) -> None:
        """Takes leave for a worker whose process has ended without doing so."""
        sender = Sender(run_id=run_id, worker_id=worker.worker_id, incarnation=worker.incarnation)
        request = LeaveRequest(sender=sender, cause=LeaveRequest.CAUSE_FAILED, message="its process has ended")
        channel = _open(self.data_address())
        try:
            ParameterServerStub(channel).Leave(request, timeout=timeout_seconds, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._readable(error) from None
        finally:
            channel.close()

    def _call(self, stub: Any, method: str, request: Any, timeout_seconds: float) -> Any:
        try:
            return getattr(stub(self._channel), method)(request, timeout=timeout_seconds, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._readable(error) from None

    def _move(self, address: str) -> None:
        self._channel.close()
        self.address, self._channel = address, _open(address)

    def _readable(self, error: Any) -> PypsError:
        code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.UNAVAILABLE:
            return ServerUnavailable(f"no server answers on {self.address}: check the address and that the server runs")
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return ProtocolMismatch(f"{self.address} speaks gRPC but is no port of a pyps server: check the address")
        names = [value for key, value in error.trailing_metadata() or () if key == METADATA_KEY]
        known = from_status(code.name, details, names[0] if names else None)
        return type(known)(f"{self.address}: {details or code.name}")

    def __enter__(self) -> Control:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()


def control_addresses(servers: str) -> tuple[str, ...]:
    """The addresses in a comma list, the control port where none is named; exits when one is malformed."""
    listed = (address.strip() for address in servers.split(","))
    with_ports = (_with_port(address) for address in listed if address)
    try:
        return parse_servers(list(with_ports))
    except PypsError as error:
        fail(str(error), status=2)


def data_addresses(servers: str, token: str) -> tuple[str, ...]:
    """The data addresses of servers, whichever port of each was named."""
    found = []
    for address in parse_servers(servers):
        with Control(address, token=token) as control:
            found.append(control.data_address())
    return parse_servers(found)


def read_token(path: Path | None) -> str:
    """The token in a file, else in PYPS_TOKEN, else nothing; exits when it cannot be used."""
    try:
        return launch.read_token(path)
    except PypsError as error:
        fail(str(error), status=2)


def call_each(
    servers: str, token_file: Path | None, method: str, request: Any, *, timeout_seconds: float
) -> list[tuple[str, Any]]:
    """Makes the same call on every server; tells of each that refuses, and exits with 1 if any did."""
    token, failed = read_token(token_file), False
    replies: list[tuple[str, Any]] = []
    for address in control_addresses(servers):
        with Control(address, token=token) as control:
            try:
                reply = control.call(method, request, timeout_seconds=timeout_seconds)
                replies.append((control.address, reply))
            except PypsError as error:
                typer.echo(f"pyps: {error}", err=True)
                failed = True
    if failed:
        if not method.startswith("Get"):
            _tell_done(method, [address for address, _ in replies])
        raise typer.Exit(1)
    return replies


def observe(servers: str, token: str, *, start_wait_seconds: float, loss_wait_seconds: float) -> Observer:
    """A reader of the run; NotInitialized where no worker has brought parameters in the time to wait."""
    waits = {"start_wait_seconds": start_wait_seconds, "loss_wait_seconds": loss_wait_seconds}
    try:
        try:
            return Observer(servers, token=token, **waits)
        except ProtocolMismatch:
            # Control ports were named, or some of them.
            return Observer(data_addresses(servers, token), token=token, **waits)
    except WaitTimedOut:
        raise NotInitialized(
            f"no worker has initialised the run yet: start one (PYPS_SERVERS={servers}), "
            "or wait longer with --wait-seconds"
        ) from None


def fail(message: str, *, status: int = 1) -> NoReturn:
    """Says what is wrong in one sentence and exits."""
    typer.echo(f"pyps: {message}", err=True)
    raise typer.Exit(status)


def _tell_done(method: str, addresses: Sequence[str]) -> None:
    if addresses:
        typer.echo(f"{method} was done on {', '.join(addresses)}.", err=True)


def _open(address: str) -> grpc.Channel:
    # A proxy of the machine must not stand between.
    return grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])


def _same_host(address: str, bound: str) -> str:
    """The port of an address as a server bound it, at the host by which it was reached."""
    return f"{address.rpartition(':')[0]}:{bound.rpartition(':')[2]}"


def _with_port(address: str) -> str:
    has_port = ":" in address.rpartition("]")[2]
    return address if has_port else f"{address}:{CONTROL_PORT}"
