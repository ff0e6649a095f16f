"""Talking to a server's control port from the command line: one call, one answer or one clear error."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, NoReturn

import grpc
import typer

from pyps_client import Observer, launch
from pyps_client.launch import parse_servers
from pyps_wire.contract import CONTROL_PORT
from pyps_wire.errors import (
    METADATA_KEY,
    BadRequest,
    NotInitialized,
    PypsError,
    ServerUnavailable,
    WaitTimedOut,
    from_status,
)
from pyps_wire.inspector_pb2_grpc import InspectorStub

TIMEOUT_SECONDS = 10.0
# A checkpoint of a large model takes its time.
SAVE_TIMEOUT_SECONDS = 600.0

SERVERS_HELP = "Control addresses, separated by commas; port 7611 where none is named."
DATA_SERVERS_HELP = "Data addresses of all servers, in order, separated by commas."
TOKEN_HELP = "File with the servers' token."

# The option of every command that talks to control ports.
Servers = Annotated[str, typer.Option(help=SERVERS_HELP, envvar="PYPS_CONTROL")]


class Control:
    """A connection to one server's control port."""

    def __init__(self, address: str, *, token: str):
        self.address = address
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        # A proxy of the machine must not stand between.
        self._channel = grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])
        self._stub: Any = InspectorStub(self._channel)

    def call(self, method: str, request: Any, *, timeout_seconds: float = TIMEOUT_SECONDS) -> Any:
        """Makes a call of the Inspector service; raises PypsError in the server's own words."""
        try:
            return getattr(self._stub, method)(request, timeout=timeout_seconds, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._readable(error) from None

    def _readable(self, error: Any) -> PypsError:
        code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.UNAVAILABLE:
            return ServerUnavailable(
                f"no server answers on {self.address}: check the address (a control port, "
                f"{CONTROL_PORT} by default) and that the server runs"
            )
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return BadRequest(f"{self.address} is no control port: name what the server gives as control, not data")
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
                replies.append((address, control.call(method, request, timeout_seconds=timeout_seconds)))
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
        return Observer(servers, token=token, **waits)
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


def _with_port(address: str) -> str:
    has_port = ":" in address.rpartition("]")[2]
    return address if has_port else f"{address}:{CONTROL_PORT}"
