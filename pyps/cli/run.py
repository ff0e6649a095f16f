"""`pyps run`: a whole job on this machine, servers and workers, until the workers are done."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from pyps.checkpoint import newest
from pyps.cli.expectations import Expectations
from pyps.config import ConfigError
from pyps.launcher import Job, JobError, JobSettings
from pyps.launcher.output import PrefixedOutput, counted
from pyps.launcher.server_output import ServerLines

WAIT_SECONDS = 1.0
# More on one machine is a slip of the finger.
SERVERS_MAX = 64
WORKERS_MAX = 256
# What follows the worker's program is the worker's, --flags too, with and without a -- before it.
CONTEXT_SETTINGS = {"allow_interspersed_args": False}


def run(
    command: Annotated[list[str], typer.Argument(help="What each worker runs, behind --.", show_default=False)],
    servers: Annotated[int, typer.Option(help="Servers to start.", min=1, max=SERVERS_MAX)] = 1,
    workers: Annotated[int, typer.Option(help="Workers to start.", min=1, max=WORKERS_MAX)] = 1,
    protocol: Annotated[str, typer.Option(help="How pushes become updates, as async, softsync:n=4, hardsync.")] = "",
    staleness: Annotated[str, typer.Option(help="What staleness costs a gradient, as none, divide.")] = "",
    warmup: Annotated[str, typer.Option(help="A stage before the protocol, as updates=200,protocol=serial.")] = "",
    schedule: Annotated[str, typer.Option(help="The learning rate over time, as cosine:length=5000.")] = "",
    optimizer: Annotated[
        str,
        typer.Option(help="Update rule and settings, as adagrad:learning_rate=0.05; empty takes the workers'."),
    ] = "",
    run_id: Annotated[str, typer.Option(help="The run's name; empty makes one.")] = "",
    checkpoint_dir: Annotated[
        Path | None,
        typer.Option(help="Folder for checkpoints, one inside it per server.", envvar="PYPS_CHECKPOINT_DIR"),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the newest checkpoint.")] = False,
    expected_workers: Annotated[
        int, typer.Option(help="Workers that the servers wait for; 0 for those started here.", min=0)
    ] = 0,
    stop_after: Annotated[str, typer.Option(help="End the run after updates=N, examples=N or seconds=N.")] = "",
    config: Annotated[Path | None, typer.Option(help="TOML file with more settings of the servers.")] = None,
    exit_when_done: Annotated[
        bool, typer.Option("--exit-when-done/--stay", help="End with the workers, or serve until Ctrl-C.")
    ] = True,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show all lines of the servers, not only warnings and errors.")
    ] = False,
) -> None:
    """Start servers and workers on this machine and end with them.

    Each worker finds its servers, its run and its place in PYPS_ variables, which pyps_client reads by
    default. Servers listen on free ports of 127.0.0.1. Further settings of the servers come from PYPS_
    variables or --config. A worker that dies is reported and not restarted; the exit status is 0 only if all
    workers finished with 0.
    """
    if resume and checkpoint_dir is None:
        raise ConfigError("--resume needs a folder to resume from: give --checkpoint-dir too")
    flags = {
        "--protocol": protocol,
        "--staleness": staleness,
        "--warmup": warmup,
        "--schedule": schedule,
        "--optimizer": optimizer,
        "--stop-after": stop_after,
        "--config": str(config) if config else "",
        "--expected-workers": str(expected_workers or workers),
    }
    settings = JobSettings(
        command=tuple(command),
        num_servers=servers,
        num_workers=workers,
        run_id=run_id,
        resume=resume,
        server_flags=tuple(part for flag, value in flags.items() if value for part in (flag, value)),
        each_server_flags=checkpoint_flags(checkpoint_dir, num_servers=servers, resume=resume),
    )
    expectations = Expectations(expected_workers or workers)
    output = PrefixedOutput(width=len(f"worker-{workers - 1}"))
    job = Job(
        settings,
        on_line=output.line if verbose else attention_only(output),
        announce=output.announce,
        without=lambda worker_id: expectations.lower(worker_id, [server.control for server in job.addresses]),
    )
    with job.handle_signals(), job:
        status = run_job(job, output, stay=not exit_when_done)
    # The servers wrote their last checkpoints when they ended.
    if job.workers and not (checkpoint_dir is None and keeps_checkpoints(config)):
        output.announce(where_the_model_is(checkpoint_dir, num_servers=servers))
    raise typer.Exit(status)


def checkpoint_flags(folder: Path | None, *, num_servers: int, resume: bool) -> tuple[tuple[str, ...], ...]:
    """What each server is told about checkpoints: a folder of its own inside `folder`."""
    if folder is None:
        return ((),) * num_servers
    rest = ("--resume",) if resume else ()
    return tuple(("--checkpoint-dir", str(folder / f"server-{index}"), *rest) for index in range(num_servers))


def attention_only(output: PrefixedOutput) -> Callable[[str, str], None]:
    """Prints all lines of workers, and of servers those that need attention."""
    lines = ServerLines()

    def line(name: str, text: str) -> None:
        if not name.startswith("server-") or lines.attention(name, text):
            output.line(name, text)

    return line


def run_job(job: Job, output: PrefixedOutput, *, stay: bool) -> int:
    """Starts the job, waits for its end and returns the exit status; with `stay` the servers serve until a signal."""
    try:
        job.start()
    except JobError as error:
        if job.signal_number is not None:
            return job.exit_status()
        output.announce(str(error))
        return 1
    control = ",".join(server.control for server in job.addresses)
    data = ",".join(server.data for server in job.addresses)
    output.announce(
        f"{counted(len(job.workers), 'worker')} on {counted(len(job.servers), 'server')}, "
        f"run {job.run_id}. Look inside: pyps status --servers {control}"
    )
    output.announce(f"Copy the model while it trains (pyps eval takes the same): pyps export FILE --servers {data}")
    while not job.done:
        job.wait(WAIT_SECONDS)
    if stay and not job.server_died and job.signal_number is None:
        output.announce("The workers are done; the servers stay until Ctrl-C.")
        wait_for_signal(job)
        # The signal was the way out that had been offered.
        return job.exit_status_of_workers()
    if job.signal_number is not None:
        output.announce("Interrupted: ending the workers, then the servers.")
    return job.exit_status()


def wait_for_signal(job: Job) -> None:
    """Waits until somebody wants the servers to end, or one of them died."""
    while job.signal_number is None and not job.server_died:
        job.wait(WAIT_SECONDS)


def keeps_checkpoints(config: Path | None) -> bool:
    """True where the servers' own file names a folder for checkpoints."""
    return config is not None and "checkpoint_dir" in tomllib.loads(config.read_text())


def where_the_model_is(folder: Path | None, *, num_servers: int) -> str:
    """What became of the model, in one line: the command that exports it, where it was kept."""
    if folder is None:
        return "The model was not kept: add --checkpoint-dir FOLDER."
    folders = [folder / f"server-{index}" for index in range(num_servers)]
    if not all(newest(one) for one in folders):
        return f"No model was kept in {folder}: the servers held none yet."
    flags = [part for one in folders for part in ("--checkpoint", str(one))]
    return f"The model was kept: {shlex.join(['pyps', 'export', 'model.safetensors', *flags])}"
