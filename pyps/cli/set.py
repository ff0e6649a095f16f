"""`pyps set`: changes how servers train while they train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from pyps.cli.control import TIMEOUT_SECONDS, TOKEN_HELP, Servers, call_each, fail
from pyps.cli.status import not_asked
from pyps_wire import inspector_pb2 as pb


def set(
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
    token_file: Annotated[Path | None, typer.Option(help=TOKEN_HELP, envvar="PYPS_TOKEN_FILE")] = None,
) -> None:
    """Change protocol, staleness policy, learning rate, schedule or expected workers of a run while it goes on.

    What is not named stays as it is, but for the staleness policy that a protocol's name brings (downpour,
    asynchronous, asgd, ssp: none). Gradients that wait are settled first, by the protocol that kept them.
    All servers of the run must be named: each changes at once, not all at the same update. Works on the servers' own
    machine only. The change is an event that `pyps status` shows, and is part of the checkpoints.
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
    if not partial:
        require_all(servers, token_file)
    expecting = "" if expected_workers is None else f", {expected_workers or 'no'} workers expected"
    for address, reply in call_each(servers, token_file, "Configure", request, timeout_seconds=TIMEOUT_SECONDS):
        typer.echo(f"{address}: {in_force(reply)}{expecting}{settled(reply)}.")
        for warning in reply.warnings:
            typer.echo(f"{address} warns: {warning}")


def require_all(servers: str, token_file: Path | None) -> None:
    """Exits, before anything changes, when the run has servers that are not among those named."""
    replies = call_each(servers, token_file, "GetStatus", pb.GetStatusRequest(), timeout_seconds=TIMEOUT_SECONDS)
    statuses = [status for _, status in replies]
    if hint := not_asked(statuses):
        total = max(status.num_servers for status in statuses)
        fail(f"nothing was set, as the run has {total} servers: {hint}, or set it on those named with --partial")


def in_force(reply: Any) -> str:
    """What a server says is in force, in a line: "hardsync, staleness none, learning rate 0.01"."""
    words = [reply.protocol, f"staleness {reply.staleness}"]
    rates = {rate.base: None for rate in reply.learning_rates}
    if rates:
        words.append(f"learning rate {' and '.join(f'{rate:g}' for rate in rates)}")
    if reply.schedule != "constant":
        words.append(f"schedule {reply.schedule}")
    return ", ".join(words)


def settled(reply: Any) -> str:
    """What became of the gradients that waited, in words; empty where none did."""
    waited, updates = reply.gradients_settled, reply.updates_made
    if not waited:
        return ""
    gradients = "1 gradient that waited" if waited == 1 else f"{waited} gradients that waited"
    return f"; {gradients} became {updates} {'update' if updates == 1 else 'updates'}"
