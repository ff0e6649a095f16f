"""`pyps coordinate`: Sandblaster's coordinator, which lowers the loss without ever seeing a parameter."""

from __future__ import annotations

import dataclasses
import os
import socket
from typing import Annotated

import typer

from pyps.cli.control import DataServers, OperatorTokenFile, data_addresses, fail, read_token
from pyps.cli.coordination import drive, flags
from pyps.launcher.process import SUPERSEDED
from pyps_client.launch import Launch, parse_servers
from pyps_wire.errors import ProtocolMismatch, RunFinished, Superseded

# The exit status after Ctrl-C: 128 and SIGINT's number.
INTERRUPTED = 130


def coordinate(
    servers: DataServers = "127.0.0.1:7610",
    iterations: flags.Iterations = flags.DEFAULTS.iterations_max,
    history: flags.History = flags.DEFAULTS.history,
    line_search: flags.LineSearch = flags.DEFAULTS.line_search,
    portions: Annotated[
        int,
        typer.Option(
            help=f"Portions that the data set is cut into. {flags.PORTIONS_HELP}", min=1, max=flags.PORTIONS_MAX
        ),
    ] = 80,
    fold: flags.FoldText = "portion",
    copies: flags.Copies = 2,
    tolerance: flags.Tolerance = flags.DEFAULTS.gradient_tolerance,
    loss_tolerance: flags.LossTolerance = flags.DEFAULTS.loss_tolerance,
    save_every: flags.SaveEvery = 0,
    run_id: Annotated[str, typer.Option(help="The run's name; empty takes what the servers hold.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON an iteration, for scripts.")] = False,
    token_file: OperatorTokenFile = None,
) -> None:
    """Coordinate Sandblaster L-BFGS: workers compute gradients, servers keep every vector, this process decides.

    The servers run with --protocol sandblaster, the workers' script calls pyps_client.sandblaster. It waits for
    both. Killed, and started again with the same flags, it goes on after the last iteration that was committed, with
    the same bits where --fold is portion. Of two coordinators the later one goes on. Work that has been ended goes on
    too, with more --iterations: start the coordinator, then the workers, which leave where they find the work ended.
    """
    settings = flags.coordination_settings(
        iterations=iterations,
        history=history,
        line_search=line_search,
        portions=portions,
        fold=fold,
        copies=copies,
        tolerance=tolerance,
        loss_tolerance=loss_tolerance,
        save_every=save_every,
    )
    token = read_token(token_file)
    launch = Launch.from_environment(
        parse_servers(servers),
        token=token,
        run_id=run_id or None,
        worker_id=f"coordinator-{socket.gethostname()}-{os.getpid()}",
    )
    try:
        try:
            drive.coordinate(launch, settings, as_json=as_json)
        except ProtocolMismatch:
            # Control ports were named, or some of them.
            addresses = data_addresses(servers, token)
            if addresses == launch.servers:
                raise
            drive.coordinate(dataclasses.replace(launch, servers=addresses), settings, as_json=as_json)
    except RunFinished as finished:
        typer.echo(f"pyps: {finished}", err=True)
    except Superseded as superseded:
        fail(f"another coordinator came after this one and goes on: {superseded}", status=SUPERSEDED)
    except KeyboardInterrupt:
        fail("interrupted; `pyps coordinate` goes on from the last iteration that it told of", status=INTERRUPTED)
