"""`pyps bench`: measures how fast this machine and running servers exchange gradients and parameters."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console
from rich.table import Table

from pyps.cli.control import INTERRUPTED, DataServers, TokenFile, data_addresses, fail
from pyps.control import Control
from pyps_client import Launch, Session
from pyps_client.credentials import Credentials, read_token
from pyps_client.push import Plan
from pyps_wire.codecs import Codec, codec_of
from pyps_wire.common_pb2 import OUTCOME_REJECTED, RUN_STATE_EMPTY, GroupSettings, OptimizerSettings, Reason
from pyps_wire.errors import NotAllowed, PypsError
from pyps_wire.parameter_server_pb2 import HelloReply
from pyps_wire.partition import Model, Tensor

# One model for the bandwidth, one for the latency.
PARAMETERS = (25_600_000, 10_000)
# Servers check every fifth of a second whether a measurement is over.
FORGET_SECONDS = 10.0
# Rounds that make connections and buffers, and timed rounds at least.
WARM_UP_ROUNDS = 2
TIMED_ROUNDS_MIN = 3
WAIT_SECONDS = 10.0

# The small rate keeps the numbers finite.
OPTIMIZER = OptimizerSettings(
    rule="adagrad", groups=[GroupSettings(hyperparameters={"learning_rate": 1e-6, "initial_accumulator_value": 0.1})]
)


class Setup(NamedTuple):
    """A transport ("auto" takes shared memory or a lane if the server offers it, else gRPC) and a codec."""

    transport: str
    codec: str


SETUPS = (Setup("auto", "float32"), Setup("grpc", "float32"), Setup("grpc", "bfloat16"))
TRANSPORTS = {"shm": "shared memory", "tcp": "lane", "grpc": "gRPC", "mixed": "several"}

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Rounds:
    """Timed rounds of one model, with the seconds of each; servers by several transports make a "mixed" one."""

    transport: str
    codec: str
    num_parameters: int
    seconds: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        ordered, num_rounds = sorted(self.seconds), len(self.seconds)
        rounds_per_second = num_rounds / sum(ordered)
        return {
            "parameters": self.num_parameters,
            "transport": self.transport,
            "codec": self.codec,
            "rounds_per_second": rounds_per_second,
            "bytes_per_second_each_way": rounds_per_second * codec_of(self.codec).max_bytes(self.num_parameters),
            "p50_seconds": ordered[math.ceil(num_rounds * 0.50) - 1],
            "p99_seconds": ordered[math.ceil(num_rounds * 0.99) - 1],
            "rounds": num_rounds,
        }


def bench(
    servers: DataServers = "127.0.0.1:7610",
    parameters: Annotated[
        list[int], typer.Option(help="Parameters of the model to measure with; may be given several times.", min=1)
    ] = list(PARAMETERS),  # noqa: B006 (typer shows it and copies it)
    codec: Annotated[
        list[str] | None,
        typer.Option(help="Measure messages in this codec too, such as int8; may be given several times."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="How long each line is measured.", min=0.0)] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts instead of a table.")] = False,
    token_file: TokenFile = None,
) -> None:
    """Measure rounds between this machine and running servers that hold no run.

    In a round one worker pushes a whole gradient and gets all new parameters back; the servers apply Adagrad. Shared
    memory is measured too where the servers run on this machine. Servers that hold a run, or wait for a job's, are
    refused and left alone; the others are empty again afterwards. Ctrl-C ends it with what was measured so far.
    """
    token = read_token(token_file)
    logging.getLogger("pyps.client").setLevel(logging.WARNING)
    greetings: dict[str, HelloReply] = {}
    measured: list[Rounds] = []
    end: PypsError | KeyboardInterrupt | None = None
    try:
        try:
            setups = [*SETUPS]
            for name in codec or ():
                codec_of(name, Codec.pushes, what="the flag --codec")
                setups.append(Setup("grpc", name))
            greetings |= {address: _greet(address, token) for address in data_addresses(servers, token)}
            for address, greeting in greetings.items():
                _require_free(address, greeting)
            measure_rounds(measured, tuple(greetings), token, setups, sizes=parameters, seconds=seconds)
        finally:
            # The results follow: ignore a further Ctrl-C.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    except (PypsError, KeyboardInterrupt) as error:
        end = error
    results = [rounds for rounds in measured if rounds.seconds]
    if isinstance(end, KeyboardInterrupt):
        if not results:
            fail("interrupted before anything was measured", status=INTERRUPTED)
        typer.echo("pyps: interrupted; what follows is what was measured so far", err=True)
    if results and as_json:
        typer.echo(json.dumps([rounds.figures() for rounds in results], indent=2))
    elif results:
        first = next(iter(greetings.values()))
        facts = f"{first.software}, {first.protocol}, staleness {first.staleness}"
        typer.echo(f"{', '.join(greetings)} ({facts}), one worker on {socket.gethostname()}:")
        Console(width=None if sys.stdout.isatty() else 120).print(_table(results))
    if isinstance(end, PypsError):
        fail(str(end))
    raise typer.Exit(INTERRUPTED if end else 0)


def _greet(address: str, token: str) -> HelloReply:
    with Control(address, token=token) as server:
        return server.hello()


def _require_free(address: str, greeting: HelloReply) -> None:
    """Raise NotAllowed for a server that holds a run or waits for one."""
    if greeting.state == RUN_STATE_EMPTY and not greeting.run_id:
        return
    verb = "waits for" if greeting.state == RUN_STATE_EMPTY else "holds"
    run = f"run {greeting.run_id!r}" if greeting.run_id else "a run that begins"
    raise NotAllowed(
        f"{address} {verb} {run}, which must not be disturbed: start a server for the measurement, without --run-id "
        "(`pyps serve --port 0 --control-port 0 --metrics-port 0` takes free ports)"
    )


def measure_rounds(
    results: list[Rounds],
    addresses: tuple[str, ...],
    token: str,
    setups: Sequence[Setup],
    *,
    sizes: Sequence[int],
    seconds: float,
) -> None:
    """Measure each setup with each size; `results` has the rounds made so far, also after an error."""
    stages = itertools.count(1)
    for size in sizes:
        # As MEASUREMENT in pyps/run/handshake.py.
        run_id = f"pyps-bench-{secrets.token_hex(4)}"
        session = partial(_session, addresses, Model((Tensor("bench", (size,)),)), token=token, run_id=run_id)
        try:
            # A worker that never pushes keeps the run between measurements.
            with session(Setup("grpc", "float32"), name="holder"):
                for setup in setups:
                    stage = f"{next(stages)} of {len(sizes) * len(setups)}"
                    typer.echo(f"{stage}: {size:,} parameters, {setup.transport}, {setup.codec} ...", err=True)
                    with session(setup, name=f"{setup.transport}-{setup.codec}") as worker:
                        _make_rounds(worker, setup, size, results, seconds=seconds)
        except BaseException:
            # The first error is reported, not that a lost server does not answer here either.
            with suppress(PypsError):
                _wait_until_forgotten(addresses, token, run_id)
            raise
        _wait_until_forgotten(addresses, token, run_id)


def _session(servers: tuple[str, ...], model: Model, setup: Setup, *, token: str, run_id: str, name: str) -> Session:
    """Join the servers as a worker, the first of which begins the run."""
    launch = Launch(
        servers=servers,
        run_id=run_id,
        worker_id=f"bench-{socket.gethostname()}-{os.getpid()}-{name}",
        **asdict(Credentials.from_environment(token)),
        start_wait_seconds=WAIT_SECONDS,
        loss_wait_seconds=WAIT_SECONDS,
        wait_seconds=6 * WAIT_SECONDS,
        gradient_codec=setup.codec,
        # Some are for gradients alone.
        parameter_codec=setup.codec if codec_of(setup.codec).pulls() else "float32",
        transport=setup.transport,
    )
    size = model.num_parameters
    return Session(model, OPTIMIZER, launch=launch, initial=lambda: [np.zeros(size, np.float32)], device="cpu")


def _make_rounds(session: Session, setup: Setup, size: int, results: list[Rounds], *, seconds: float) -> None:
    """Append rounds of this many seconds, at least a few, to `results`; none where "auto" has become gRPC."""
    memory = session.lend()
    if setup.transport == "auto" and session.transport == "grpc":
        return
    gradient, parameters = memory.gradients[0], memory.parameters
    values, codec = np.full(size, 1e-3, np.float32), codec_of(setup.codec)
    gradient[0][:] = values if codec.dtype is None else np.frombuffer(codec.encode(values), codec.dtype)
    session.pull(parameters)

    for _ in range(WARM_UP_ROUNDS):
        _make_round(session, gradient, parameters)
    # Appended before the first round, so that no interruption loses rounds.
    rounds = Rounds(session.transport, setup.codec, size)
    results.append(rounds)
    end = time.perf_counter() + seconds
    while len(rounds.seconds) < TIMED_ROUNDS_MIN or time.perf_counter() < end:
        rounds.seconds.append(_make_round(session, gradient, parameters))


def _make_round(session: Session, gradient: Sequence[Array], parameters: Sequence[Array]) -> float:
    """Make one round, with the waits of the protocol in force; return its seconds."""
    began = time.perf_counter()
    session.proceed()
    session.clock += 1
    receipts = session.exchange(Plan(gradient, parameters))
    if session.pull_needed:
        session.pull(parameters)
    took = time.perf_counter() - began
    for receipt in receipts:
        if receipt.outcome == OUTCOME_REJECTED:
            raise PypsError(f"a server refused a gradient: {receipt.message or Reason.Name(receipt.reason)}")
    return took


def _wait_until_forgotten(addresses: tuple[str, ...], token: str, run_id: str) -> None:
    """Wait until the servers are empty again; print a hint for each that still holds the run."""
    deadline = time.monotonic() + FORGET_SECONDS
    for address in addresses:
        while _greet(address, token).run_id == run_id:
            if time.monotonic() > deadline:
                typer.echo(f"pyps: {address} still holds {run_id}: `pyps reset {run_id}` there empties it", err=True)
                break
            time.sleep(0.05)


def _table(results: Sequence[Rounds]) -> Table:
    table = Table(caption="a round: a whole gradient to the servers, their update, all new parameters back")
    for name in ("parameters", "transport", "numbers", "rounds/s", "GB/s each way", "p50 ms", "p99 ms", "rounds"):
        table.add_column(name, justify="left" if name in ("transport", "numbers") else "right")
    for one in (rounds.figures() for rounds in results):
        table.add_row(
            f"{one['parameters']:,}",
            TRANSPORTS.get(one["transport"], one["transport"]),
            one["codec"],
            f"{one['rounds_per_second']:,.1f}",
            f"{one['bytes_per_second_each_way'] / 1e9:.3f}",
            f"{1e3 * one['p50_seconds']:,.2f}",
            f"{1e3 * one['p99_seconds']:,.2f}",
            f"{one['rounds']:,}",
        )
    return table
