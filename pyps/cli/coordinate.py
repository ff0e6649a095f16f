"""`pyps coordinate`: Sandblaster's coordinator, which lowers the loss without ever seeing a parameter."""

from __future__ import annotations

import os
import socket
from typing import Annotated, Any

import typer

from pyps.cli.control import INTERRUPTED, DataServers, OperatorTokenFile, data_addresses, fail
from pyps.cli.coordination.coordinator import coordinate as coordinate_run
from pyps.cli.coordination.settings import CoordinationSettings, with_coordination
from pyps.launcher.process import SUPERSEDED
from pyps_client.credentials import read_token
from pyps_client.launch import Launch, parse_servers
from pyps_wire.errors import ProtocolMismatch, RunFinished, Superseded


@with_coordination
def coordinate(
    servers: DataServers = "127.0.0.1:7610",
    run_id: Annotated[str, typer.Option(help="The run's name; empty takes that of the servers.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON an iteration, for scripts.")] = False,
    token_file: OperatorTokenFile = None,
    **coordination: Any,
) -> None:
    """Coordinate Sandblaster L-BFGS: workers compute gradients, servers keep every vector, this process decides.

    The servers run with --protocol sandblaster, the workers' script calls pyps_client.sandblaster. The coordinator
    waits for both. Killed and started again with the same flags, it continues after the last committed iteration, with
    the same bits if --fold is portion. Of two coordinators the later one continues. Work that has ended continues with
    more --iterations: start the coordinator first, then the workers, which leave if they find the work ended.
    """
    settings = CoordinationSettings(**coordination)
    token = read_token(token_file)
    launch = Launch(
        parse_servers(servers),
        token=token,
        run_id=run_id or None,
        worker_id=f"coordinator-{socket.gethostname()}-{os.getpid()}",
    )
    try:
        try:
            coordinate_run(launch, settings, as_json=as_json)
        except ProtocolMismatch:
            # Some of the addresses are of control ports.
            addresses = data_addresses(servers, token)
            if addresses == launch.servers:
                raise
            coordinate_run(launch.with_(servers=addresses), settings, as_json=as_json)
    except RunFinished as finished:
        typer.echo(f"pyps: {finished}", err=True)
    except Superseded as superseded:
        # With this status it is not started again, which would only replace the later one.
        fail(f"another coordinator came after this one and goes on: {superseded}", status=SUPERSEDED)
    except KeyboardInterrupt:
        fail("interrupted; `pyps coordinate` goes on from the last reported iteration", status=INTERRUPTED)
