"""`pyps bench`: how fast this machine and running servers exchange gradients and parameters."""

from __future__ import annotations

import json
import logging
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pyps.cli.bench_progress import BenchProgress
from pyps.cli.control import TOKEN_HELP, Control, DataServers, data_addresses, fail, read_token
from pyps.cli.rounds import Bench, Rounds, Way
from pyps.run.handshake import new_name
from pyps_wire.common_pb2 import RUN_STATE_EMPTY
from pyps_wire.errors import NotAllowed, PypsError
from pyps_wire.parameter_server_pb2 import HelloReply

# One model for the bandwidth, one for the latency.
PARAMETERS = (25_600_000, 10_000)
# Servers look every fifth of a second whether a measurement is over.
FORGET_SECONDS = 10.0
# The exit status after Ctrl-C: 128 and SIGINT's number.
INTERRUPTED = 130

WAYS = (Way("auto", "float32"), Way("grpc", "float32"), Way("grpc", "bfloat16"))
TRANSPORTS = {"shm": "shared memory", "grpc": "gRPC", "mixed": "shared memory and gRPC"}


def bench(
    servers: DataServers = "127.0.0.1:7610",
    parameters: Annotated[
        list[int], typer.Option(help="Parameters of the model to measure with; may be given several times.", min=1)
    ] = list(PARAMETERS),  # noqa: B006 (typer shows it and copies it)
    seconds: Annotated[float, typer.Option(help="How long each line is measured.", min=0.0)] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts instead of a table.")] = False,
    token_file: Annotated[Path | None, typer.Option(help=TOKEN_HELP, envvar="PYPS_TOKEN_FILE")] = None,
) -> None:
    """Measure rounds between this machine and running servers that hold no run.

    In a round one worker pushes a whole gradient and gets all new parameters back; the servers apply Adagrad. Where the
    servers run on this machine, shared memory is measured too. Servers that hold a run, or wait for that of a job, are
    refused and left alone; those that are measured are empty again afterwards. Ctrl-C, or an
    error, ends it with what was measured.
    """
    token = read_token(token_file)
    # That workers join and leave is no news here.
    logging.getLogger("pyps.client").setLevel(logging.WARNING)
    addresses: tuple[str, ...] = ()
    greetings: list[HelloReply] = []
    measured: list[Rounds] = []
    end: PypsError | KeyboardInterrupt | None = None
    try:
        try:
            addresses = data_addresses(servers, token)
            greetings += [_greet(address, token) for address in addresses]
            for address, greeting in zip(addresses, greetings, strict=True):
                _require_free(address, greeting)
            _measure(measured, addresses, token, sizes=parameters, seconds=seconds)
        finally:
            # What was measured is shown now: no further Ctrl-C comes between.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    except (PypsError, KeyboardInterrupt) as error:
        end = error
    results = [rounds for rounds in measured if rounds.seconds]
    if isinstance(end, KeyboardInterrupt):
        if not results:
            fail("interrupted before anything was measured", status=INTERRUPTED)
        typer.echo("pyps: interrupted; what follows is what was measured so far", err=True)
    if results:
        _show(results, addresses, greetings, as_json=as_json)
    if isinstance(end, KeyboardInterrupt):
        raise typer.Exit(INTERRUPTED)
    if end is not None:
        fail(str(end))


def _show(
    results: Sequence[Rounds], addresses: Sequence[str], greetings: Sequence[HelloReply], *, as_json: bool
) -> None:
    if as_json:
        typer.echo(json.dumps([_plain(rounds) for rounds in results], indent=2))
        return
    facts = (greetings[0].software, greetings[0].protocol, f"staleness {greetings[0].staleness}")
    typer.echo(f"{', '.join(addresses)} ({', '.join(facts)}), one worker on {socket.gethostname()}:")
    Console(width=None if sys.stdout.isatty() else 120).print(_table(results))


def _greet(address: str, token: str) -> HelloReply:
    with Control(address, token=token) as server:
        return server.hello()


def _require_free(address: str, greeting: HelloReply) -> None:
    """Refuses a server that somebody uses, or is about to use."""
    if greeting.state == RUN_STATE_EMPTY and not greeting.run_id:
        return
    verb = "waits for" if greeting.state == RUN_STATE_EMPTY else "holds"
    run = f"run {greeting.run_id!r}" if greeting.run_id else "a run that begins"
    raise NotAllowed(
        f"{address} {verb} {run}, which must not be disturbed: start a server for the measurement, without --run-id "
        "(`pyps serve --port 0 --control-port 0 --metrics-port 0` takes free ports)"
    )


def _measure(
    results: list[Rounds], addresses: tuple[str, ...], token: str, *, sizes: Sequence[int], seconds: float
) -> None:
    """Measures each way with each size into `results`, which has all rounds that were made whatever ends it."""
    with BenchProgress(Console(stderr=True), num_stages=len(sizes) * len(WAYS), seconds=seconds) as progress:
        for size in sizes:
            run_id = new_name()
            bench = Bench(addresses, token=token, run_id=run_id, num_parameters=size)
            try:
                with bench.open():
                    for way in WAYS:
                        progress.begin(way, size)
                        bench.measure(way, results, seconds=seconds, made=progress.made)
            except BaseException:
                # What ended it is said, not that a server that is gone cannot be asked either.
                with suppress(PypsError):
                    _wait_until_forgotten(addresses, token, run_id)
                raise
            _wait_until_forgotten(addresses, token, run_id)


def _wait_until_forgotten(addresses: tuple[str, ...], token: str, run_id: str) -> None:
    """Waits until the servers are empty again; says so where one is not in time."""
    deadline = time.monotonic() + FORGET_SECONDS
    for address in addresses:
        while _greet(address, token).run_id == run_id:
            if time.monotonic() > deadline:
                typer.echo(f"pyps: {address} still holds {run_id}: `pyps reset {run_id}` there empties it", err=True)
                break
            time.sleep(0.05)


def _table(results: Sequence[Rounds]) -> Table:
    table = Table(caption="a round: a whole gradient to the servers, their update, all new parameters back")
    table.add_column("parameters", justify="right")
    table.add_column("transport")
    table.add_column("numbers")
    for name in ("rounds/s", "GB/s each way", "p50 ms", "p99 ms", "rounds"):
        table.add_column(name, justify="right")
    for rounds in results:
        table.add_row(
            f"{rounds.num_parameters:,}",
            TRANSPORTS[rounds.transport],
            rounds.codec,
            f"{rounds.rounds_per_second:,.1f}",
            f"{rounds.bytes_per_second / 1e9:.3f}",
            f"{1e3 * rounds.percentile(50):,.2f}",
            f"{1e3 * rounds.percentile(99):,.2f}",
            f"{len(rounds.seconds):,}",
        )
    return table


def _plain(rounds: Rounds) -> dict[str, object]:
    return {
        "parameters": rounds.num_parameters,
        "transport": rounds.transport,
        "codec": rounds.codec,
        "rounds_per_second": rounds.rounds_per_second,
        "bytes_per_second_each_way": rounds.bytes_per_second,
        "p50_seconds": rounds.percentile(50),
        "p99_seconds": rounds.percentile(99),
        "rounds": len(rounds.seconds),
    }
