"""What commands that call running servers share, and those that are one call: `pyps set`, `save`, `stop`, `drain`..."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, NoReturn

import grpc
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pyps.control import Control, change_all, configure_all, open_to
from pyps_client import Observer
from pyps_client.credentials import Credentials, read_token
from pyps_client.launch import Launch, parse_servers
from pyps_client.places import address_of
from pyps_wire import inspector_pb2 as pb
from pyps_wire.contract import CONTROL_PORT, DATA_PORT
from pyps_wire.errors import NotInitialized, ProtocolMismatch, PypsError, WaitTimedOut

# The exit status after Ctrl-C: 128 and SIGINT's number.
INTERRUPTED = 130

SERVERS_HELP = (
    "Addresses of all servers, in order, separated by commas: of each its data or its control port. Or file:PATH with "
    "an address a line, or dns:COUNT@NAME:PORT for so many behind one name."
)
_TOKEN_HELP = "File with a token of the servers for"

# For commands that call control ports, and for those that call data ports; each server leads to its other port.
Servers = Annotated[str, typer.Option(help=SERVERS_HELP, envvar=["PYPS_CONTROL", "PYPS_SERVERS"])]
DataServers = Annotated[str, typer.Option(help=SERVERS_HELP, envvar=["PYPS_SERVERS", "PYPS_CONTROL"])]
# For commands that read, train, or change servers: the least token that is sufficient.
_OBSERVERS, _WORKERS, _OPERATORS = "PYPS_OBSERVER_TOKEN_FILE", "PYPS_TOKEN_FILE", "PYPS_OPERATOR_TOKEN_FILE"
ObserverTokenFile = Annotated[
    Path | None,
    typer.Option("--token-file", help=f"{_TOKEN_HELP} observers.", envvar=[_OBSERVERS, _WORKERS, _OPERATORS]),
]
TokenFile = Annotated[Path | None, typer.Option(help=f"{_TOKEN_HELP} workers.", envvar=_WORKERS)]
OperatorTokenFile = Annotated[
    Path | None, typer.Option("--token-file", help=f"{_TOKEN_HELP} operators.", envvar=[_OPERATORS, _WORKERS])
]


def resolved(servers: str, *, port: int = CONTROL_PORT) -> tuple[str, ...]:
    """Return the servers' current addresses, with `port` if none is named."""
    return tuple(address_of(place, port=port) for place in parse_servers(servers, port=port))


def data_addresses(servers: str, token: str) -> tuple[str, ...]:
    """Return the data addresses of servers, given any of their ports."""
    addresses = []
    for address in resolved(servers, port=DATA_PORT):
        with Control(address, token=token) as control:
            addresses.append(control.data_address())
    return parse_servers(addresses)


def inherited_token() -> str:
    """Return the token with the highest role of servers that inherit this environment."""
    return read_token(inherited_token_file())


def inherited_token_file() -> Path | None:
    file = os.environ.get(_OPERATORS) or os.environ.get(_WORKERS)
    return Path(file) if file else None


def change_each(servers: str, token_file: Path | None, method: str, request: Any) -> list[tuple[str, Any]]:
    """Make a change on every server if all would accept it; else print each refusal and exit with 1."""
    replies, refusals = change_all(resolved(servers), read_token(token_file), method, request)
    if refusals:
        done = f"was done on {', '.join(address for address, _ in replies)} only" if replies else "was done nowhere"
        fail("\npyps: ".join([*map(str, refusals), f"{method} {done}"]))
    return replies


def observe(servers: str, token: str, *, start_wait_seconds: float, loss_wait_seconds: float) -> Observer:
    """Connect a reader of the run; raise NotInitialized if it has no parameters in time."""
    launch = Launch(servers, token=token, start_wait_seconds=start_wait_seconds, loss_wait_seconds=loss_wait_seconds)
    try:
        try:
            return Observer(launch=launch)
        except ProtocolMismatch:
            return Observer(launch=launch.with_(servers=data_addresses(servers, token)))
    except WaitTimedOut:
        raise NotInitialized(
            f"no worker has initialised the run yet: start one (PYPS_SERVERS={servers}), "
            "or wait longer with --wait-seconds"
        ) from None


def fail(message: str, *, status: int = 1) -> NoReturn:
    typer.echo(f"pyps: {message}", err=True)
    raise typer.Exit(status)


def configure(
    servers: Servers = "127.0.0.1:7611",
    protocol: Annotated[str, typer.Option(help="How pushes become updates, as hardsync or softsync:n=4.")] = "",
    staleness: Annotated[str, typer.Option(help="What staleness costs a gradient, as none or divide.")] = "",
    learning_rate: Annotated[
        float | None, typer.Option(help="The learning rate of every parameter group, before the schedule.")
    ] = None,
    schedule: Annotated[str, typer.Option(help="How the rate changes by version, as step:every=100,factor=0.5.")] = "",
    expected_workers: Annotated[
        int | None, typer.Option(help="Workers that the job has, those that have ended included; 0: unknown.", min=0)
    ] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Set it on the servers named, though the run has more.")
    ] = False,
    token_file: OperatorTokenFile = None,
) -> None:
    """Change protocol, staleness policy, learning rate, schedule or expected workers of a run while it goes on.

    Everything else stays, except the staleness policy that some protocols bring (downpour, asynchronous, asgd, ssp:
    none). The protocol that kept waiting gradients settles them first. Name all servers of the run: nothing changes
    unless all accept it; then each changes at once, not all at the same update. Works on the servers' own machine, or
    with an operator's token. The change is an event that `pyps status` shows, and part of checkpoints.
    """
    if not (protocol or staleness or schedule or learning_rate is not None or expected_workers is not None):
        fail(
            "nothing was named to set: give --protocol, --staleness, --learning-rate, --schedule or --expected-workers",
            status=2,
        )
    request = pb.ConfigureRequest(
        protocol=protocol,
        staleness=staleness,
        schedule=schedule,
        learning_rate=learning_rate,
        expected_workers=expected_workers,
    )
    try:
        lines = configure_all(resolved(servers), read_token(token_file), request, partial=partial)
    except PypsError as error:
        fail(str(error))
    typer.echo("\n".join(lines))


def save(servers: Servers = "127.0.0.1:7611", token_file: OperatorTokenFile = None) -> None:
    """Make servers write a checkpoint now, each into its --checkpoint-dir.

    Works on the servers' own machine, or with an operator's token.
    """
    for address, reply in change_each(servers, token_file, "SaveCheckpoint", pb.SaveCheckpointRequest()):
        typer.echo(f"{address} wrote {reply.path}: {reply.bytes:,} bytes in {reply.seconds:.2f} s.")


def stop(servers: Servers = "127.0.0.1:7611", token_file: OperatorTokenFile = None) -> None:
    """Finish the run: workers end, the servers refuse pushes and go on answering pulls.

    Works on the servers' own machine, or with an operator's token.
    """
    for address, _ in change_each(servers, token_file, "Stop", pb.StopRequest()):
        typer.echo(f"{address} has finished its run.")


def promote(servers: Servers = "127.0.0.1:7611", token_file: OperatorTokenFile = None) -> None:
    """Make each server named the one that serves, of it and its standby.

    A standby takes over; a server that waits to hear of its silent standby goes on without it. Works on the servers'
    own machine, or with an operator's token.
    """
    for address, _ in change_each(servers, token_file, "Promote", pb.PromoteRequest()):
        typer.echo(f"{address} serves.")


def drain(servers: Servers = "127.0.0.1:7611", token_file: OperatorTokenFile = None) -> None:
    """Let each server named hand over to its standby and end, while training goes on.

    Works on the servers' own machine, or with an operator's token.
    """
    for address, reply in change_each(servers, token_file, "Drain", pb.DrainRequest()):
        typer.echo(f"{address} ends; {reply.standby} serves in its place.")


def reset(
    run_id: Annotated[str, typer.Argument(help="The run to forget: its name, as `pyps status` gives it.")],
    servers: Servers = "127.0.0.1:7611",
    token_file: OperatorTokenFile = None,
) -> None:
    """Make servers forget a run, its parameters included.

    Its checkpoints stay on the servers' disks, renamed to forgotten-..., so that --resume does not bring it back.
    Works on the servers' own machine, or with an operator's token.
    """
    for address, _ in change_each(servers, token_file, "Reset", pb.ResetRequest(run_id=run_id)):
        typer.echo(f"{address} has forgotten run {run_id!r} and is empty.")


def health(
    servers: Servers = "127.0.0.1:7610",
    timeout_seconds: Annotated[float, typer.Option(help="How long each may take to answer.", min=0.1)] = 5.0,
) -> None:
    """Check servers' health; exit with 0 when all of them serve. Needs no token."""
    addresses = resolved(servers, port=DATA_PORT)
    answers = [_health_of(address, timeout_seconds=timeout_seconds) for address in addresses]
    for address, answer in zip(addresses, answers, strict=True):
        typer.echo(f"{address} {answer}")
    raise typer.Exit(0 if {*answers} == {"SERVING"} else 1)


def _health_of(address: str, *, timeout_seconds: float) -> str:
    """Return the server's health as gRPC names it, or why the server did not answer."""
    shown = Credentials.from_environment()
    with open_to(address, shown) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(  # type: ignore[attr-defined]
                health_pb2.HealthCheckRequest(), timeout=timeout_seconds
            )
        except grpc.RpcError as error:
            refusal = shown.refusal(address, error.details() or "")
            return f"{error.code().name}{refusal and f': {refusal}'}"
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))
