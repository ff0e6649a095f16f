"""`pyps run`: servers and workers on this machine, until the workers are done."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from pyps.cli.control import inherited_token
from pyps.cli.serve import KEPT, OF_A_JOB, with_settings
from pyps.config import ConfigError
from pyps.control import Control
from pyps.launcher import Job, JobError, JobSettings
from pyps.launcher.environment import check_job, spelled
from pyps.launcher.job import PYPS
from pyps.launcher.process import COORDINATOR, ChildProcess, beside
from pyps.storage.checkpoint import Checkpoint
from pyps.storage.checkpoint_set import convert, differing, folders_of
from pyps.storage.folder import checkpoint_paths, newest
from pyps.storage.object_store import is_remote
from pyps.units import counted
from pyps_wire import inspector_pb2 as pb
from pyps_wire.errors import PypsError

WAIT_SECONDS = 1.0
PAGE = (*PYPS, "dashboard", "--port", "0")
NOT_KEPT = "The model {} kept: add --checkpoint-dir FOLDER."
SERVERS_MAX = 64
WORKERS_MAX = 256
_CALL_SECONDS = 5.0
# Lines of pyps.logs, as text and as JSON.
_ROUTINE = re.compile(r'\d{4}-\d\d-\d\dT\S+ (DEBUG|INFO) |\{"time": "[^"]*", "level": "(debug|info)"')
_START_BLOCK = re.compile(r"pyps \S+ parameter server$")
# Flags after the worker's program are the worker's, with or without a -- before it.
CONTEXT_SETTINGS = {"allow_interspersed_args": False}


# Flags of the commands that start servers and workers.
WorkerCommand = Annotated[list[str], typer.Argument(help="What each worker runs, behind --.", show_default=False)]
LocalServers = Annotated[int, typer.Option("--servers", help="Servers to start.", min=1, max=SERVERS_MAX)]
LocalWorkers = Annotated[
    int,
    typer.Option(
        "--workers", "--replicas", help="Workers to start, each of --parts processes.", min=1, max=WORKERS_MAX
    ),
]
Parts = Annotated[
    int | None,
    typer.Option(
        help="Processes of each worker, each of which holds a part of the model; 1 by default.",
        min=1,
        max=WORKERS_MAX,
        show_default=False,
    ),
]
RunId = Annotated[str, typer.Option(help="The run's name; empty makes one.")]
ConfigFile = Annotated[Path | None, typer.Option(help="TOML file with more settings of the servers.")]
Stay = Annotated[bool, typer.Option("--stay", help="Keep serving after the workers' end, until Ctrl-C.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", help="Show all lines of the servers, not only warnings and errors.")
]


@with_settings(*OF_A_JOB, *KEPT, "init_from", "update_log", "log_gradients")
def run(
    command: WorkerCommand,
    servers: LocalServers = 1,
    workers: LocalWorkers = 1,
    parts: Parts = None,
    max_restarts: Annotated[
        int, typer.Option(help="How often each worker that failed is started again, all its parts.", min=0)
    ] = 0,
    run_id: RunId = "",
    expected_workers: Annotated[
        int, typer.Option(help="Workers that the servers wait for; 0 for those started here.", min=0)
    ] = 0,
    standby: Annotated[
        bool, typer.Option("--standby", help="Start a standby for each server, which takes over when that dies.")
    ] = False,
    config: ConfigFile = None,
    stay: Stay = False,
    dashboard: Annotated[
        bool, typer.Option("--dashboard", help="Show the run as a page, whose address is printed; see pyps dashboard.")
    ] = False,
    report: Annotated[
        Path | None, typer.Option(help="File for that page with its data, written at the end.", show_default=False)
    ] = None,
    verbose: Verbose = False,
    **settings: str | bool | None,
) -> None:
    """Start servers and workers on this machine and end with them.

    Each worker finds its servers, its run and its place in PYPS_ variables, which pyps_client reads by
    default. Servers listen on free ports of 127.0.0.1, and each has its own folder inside --checkpoint-dir and
    --update-log. Set any other setting of `pyps serve` by its PYPS_ variable, which `pyps serve --help` names, or in
    --config. A worker that dies is reported, and started again as often as --max-restarts says; a server that dies is
    started again from --checkpoint-dir, and workers wait for it. The exit status is 0 only if the last life of every
    worker finished with 0.

    With --parts a worker is a replica: several processes that hold a part of the model each and count as one
    worker. torch.distributed finds the processes of a replica, and no others, in RANK, LOCAL_RANK, WORLD_SIZE,
    LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which are set as under torchrun. A replica that loses a process
    ends as a whole, and the other replicas go on.
    """
    job = JobSettings(
        command=tuple(command),
        num_servers=servers,
        num_workers=workers,
        num_parts=parts,
        restarts_max=max_restarts,
        run_id=run_id,
        standby=standby,
    )
    expected = expected_workers or workers
    page = [*PAGE, *([] if report is None else ["--save", str(report)])] if dashboard or report is not None else []
    run_locally(job, settings, config, expected_workers=expected, stay=stay, page=page, verbose=verbose)


def run_locally(
    settings: JobSettings,
    server_settings: Mapping[str, str | bool | None],
    config: Path | None,
    *,
    expected_workers: int,
    stay: bool,
    page: Sequence[str] = (),
    verbose: bool,
) -> NoReturn:
    """Check everything, run the job on this machine, and exit with its status.

    `settings` is the job without the settings of its servers, which are in `server_settings` and in the file `config`.
    `page` is the command that shows the job, without its servers; empty for none.
    """
    if (processes := settings.num_workers * settings.num_processes) > WORKERS_MAX:
        raise ConfigError(
            f"--workers {settings.num_workers} of --parts {settings.num_parts} are {processes} processes, but at most "
            f"{WORKERS_MAX} are started on one machine"
        )
    server_settings = {**server_settings, "expected_workers": str(expected_workers)}
    sizes = {"num_servers": settings.num_servers, "num_workers": settings.num_workers}
    resolved = check_job(server_settings, config, **sizes)
    kept = Kept(resolved.checkpoint_dir, settings.num_servers, resumed=resolved.resume)
    nothing_to_resume = resolved.resume and not kept.fit_servers()
    settings = replace(
        settings,
        config=resolved,
        server_flags=spelled(server_settings, config),
        newest_checkpoint=kept.newest_of,
        after_a_death=kept.after_a_death,
    )
    expectations = Expectations(expected_workers)
    names = [settings.process_name(settings.num_workers - 1, settings.num_processes - 1)]
    names += [COORDINATOR] if settings.coordinator_flags is not None else []
    names += ["dashboard"] if page else []
    output = PrefixedOutput(width=max(map(len, names)), verbose=verbose)
    job = Job(
        settings,
        on_line=output.line,
        announce=output.announce,
        expect_fewer=lambda worker_id: expectations.lower(
            worker_id, [server.control for server in job.addresses], key=job.keys[worker_id]
        ),
    )
    hint = f"There was nothing to resume in {kept.folder}: a new run begins." if nothing_to_resume else ""
    with job.handle_signals(), job:
        hint = hint if kept.folder else NOT_KEPT.format("will not be")
        status = _run_until_done(job, output, stay=stay, page=page, hint=hint)
    if page and "--save" not in page:
        output.announce("The page was not kept: add --report FILE.")
    if job.workers:
        for words in kept.in_words(job.ended_badly, interrupted=status > 128):
            output.announce(words)
    # A server that could not write its last checkpoint is a failure.
    raise typer.Exit(status or (1 if job.ended_badly else 0))


def _run_until_done(job: Job, output: PrefixedOutput, *, stay: bool, page: Sequence[str], hint: str) -> int:
    """Start the job and wait for its end; return its exit status. `hint` is printed once the job has started."""
    try:
        job.start()
    except JobError as error:
        if job.signal_number is not None:
            return job.exit_status()
        output.announce(str(error))
        return 1
    servers = ",".join(server.data for server in job.addresses)
    output.announce(
        f"{job.settings.workers_in_words()} on {counted(len(job.servers), 'server')}, "
        f"run {job.run_id}. Look inside: pyps status --servers {servers}"
    )
    output.announce(f"Copy the model while it trains (pyps eval takes the same): pyps export FILE --servers {servers}")
    if hint:
        output.announce(hint)
    with _shown(job, page, output) if page else contextlib.nullcontext():
        while not job.done:
            job.wait(WAIT_SECONDS)
        stays = stay and not job.server_died and job.signal_number is None
        if stays:
            output.announce("The workers are done; the servers stay until Ctrl-C.")
            while job.signal_number is None and not job.server_died:
                job.wait(WAIT_SECONDS)
            # The signal was expected.
            return job.exit_status_of_workers()
    if job.signal_number is not None:
        output.announce("Interrupted: ending the workers, then the servers.")
    return job.exit_status()


def _shown(job: Job, page: Sequence[str], output: PrefixedOutput) -> contextlib.AbstractContextManager[None]:
    """Show the job by that command, in a process of its own, with which nothing of the job ends."""

    def ended(child: ChildProcess) -> None:
        output.announce(f"{child.name} {child.how_it_ended()}: the job goes on without it.")

    command = [*page, "--servers", ",".join(job.server_places)]
    return beside("dashboard", command, on_line=output.line, on_end=ended)


@dataclass(frozen=True)
class Kept:
    """The job's folder for checkpoints, with a folder for each server; None if none are written."""

    folder: Path | None
    num_servers: int
    # Whether the job went on from what was there.
    resumed: bool = False

    @property
    def folders(self) -> list[Path]:
        return [self.folder / f"server-{index}" for index in range(self.num_servers)] if self.folder else []

    def newest(self) -> dict[str, Checkpoint]:
        """Return the newest checkpoint of each server that has one, by the server's name."""
        return {
            one.name: checkpoint
            for one in self.folders
            if (is_remote(one) or one.is_dir()) and (checkpoint := newest(one))
        }

    def newest_of(self, name: str) -> Path | None:
        """Return where the newest checkpoint of the server, or of the standby in its place, is."""
        found = self.newest().get(name.replace("standby", "server"))
        return None if found is None else found.path

    def fit_servers(self) -> bool:
        """Return whether there is a run to resume, placed on this number of servers where it was on another."""
        found = self.newest()
        before = {checkpoint.header.num_servers for checkpoint in found.values()} - {self.num_servers}
        if self.folder and before:
            plan = convert([self.folder], self.folder, num_servers=self.num_servers)[0].header.partition
            typer.echo(
                f"The run in {self.folder} was on {counted(before.pop(), 'server')} and goes on on {self.num_servers}. "
                "Its older checkpoints are kept as forgotten-*.json."
            )
            if (idle := self.num_servers - plan.num_shards) > 0:
                typer.echo(
                    f"The model has {counted(plan.num_shards, 'shard')}, so {counted(idle, 'server')} will hold none: "
                    "`pyps checkpoint convert --shard-size` makes more."
                )
        elif words := differing(found.values()):
            typer.echo(f"In {self.folder} {words}.")
        return bool(found)

    def after_a_death(self, name: str) -> str:
        """Return how to go on once the server of that name has died."""
        if not self.folder:
            return NOT_KEPT.format("was not")
        if self.newest_of(name) is None:
            return f"It had written no checkpoint: its part of the model is lost. Start again without {self.folder}."
        return self._go_on()

    def _go_on(self) -> str:
        again = ["pyps", *sys.argv[1:2], *([] if self.resumed else ["--resume"]), *sys.argv[2:]]
        return f"Go on from the newest checkpoints: {shlex.join(again)}"

    def in_words(self, ended_badly: Mapping[str, int], *, interrupted: bool = False) -> Iterator[str]:
        """Say what became of the model, with the command that exports it and, `interrupted`, the one to go on.

        `ended_badly` has the exit statuses of servers that failed.
        """
        if self.folder is None:
            yield NOT_KEPT.format("was not")
            return
        found = self.newest()
        # Of a signal the servers' lines say nothing.
        why = " (the lines above say why)" if max(ended_badly.values(), default=0) > 0 else ""
        missing = f"{', '.join(ended_badly)} ended without the last checkpoint{why}"
        if len(found) < len(self.folders):
            without = ", ".join(one.name for one in self.folders if one.name not in found)
            none_yet = f"{without} held none of it" if found else "the servers held none yet"
            yield f"No whole model was kept in {self.folder}: {missing if ended_badly else none_yet}."
            return
        # The job's folder stands for all servers' folders, unless an earlier job left others in it.
        in_one = all(one in self.folders or not checkpoint_paths(one) for one in folders_of(self.folder))
        flags = [part for one in ([self.folder] if in_one else self.folders) for part in ("--checkpoint", str(one))]
        command = shlex.join(["pyps", "export", "model.safetensors", *flags])
        versions = ", ".join(f"version {one.version_max} of {name}" for name, one in found.items() if one.versions)
        yield f"{missing}; kept is {versions}: {command}" if ended_badly else f"The model was kept: {command}"
        if interrupted:
            yield self._go_on()


class Expectations:
    """Lowers the number of workers that servers expect, for each worker that ended for good and never joined."""

    def __init__(self, expected_workers: int):
        self._expected_workers = expected_workers
        self._token = inherited_token()
        self._ended = set[str]()

    def lower(self, worker_id: str, addresses: Sequence[str], *, key: str) -> bool:
        """Make servers that the worker never joined expect one fewer; return whether it joined none of them.

        Other servers get the worker's Leave, and so need not wait for its lease. A worker that joined under another
        name than the job's seems never to have joined: a first round may then begin without it.
        """
        self._ended.add(worker_id)
        lowered = {self._lower(worker_id, address, key) for address in addresses}
        return True in lowered and False not in lowered

    def _lower(self, worker_id: str, address: str, key: str) -> bool | None:
        """Return True where the server expects one fewer now, False where the worker joined, None without an answer."""
        try:
            with Control(address, token=self._token, timeout_seconds=_CALL_SECONDS) as control:
                known = control.call("ListWorkers", pb.ListWorkersRequest())
                if own := [worker for worker in known.workers if worker_id == (worker.replica or worker.worker_id)]:
                    run_id = control.call("GetStatus", pb.GetStatusRequest()).run_id
                    for worker in own:
                        if worker.state == "alive":
                            control.leave_for(worker, run_id, key=key)
                    return False
                # A server that was started again knows only those that have joined it since.
                ended = self._ended - {worker.replica or worker.worker_id for worker in known.workers}
                expected = max(0, self._expected_workers - len(ended))
                control.call("Configure", pb.ConfigureRequest(expected_workers=expected))
        except PypsError:
            return None
        return True


class PrefixedOutput:
    """Prints lines with an aligned name, as "worker-0 | step 10", from any thread.

    Routine log lines of servers are printed only if it is verbose.
    """

    def __init__(self, width: int, *, verbose: bool = False) -> None:
        self._width = width
        self._verbose = verbose
        self._lock = threading.Lock()
        # Servers that are writing their start block.
        self._starting: set[str] = set()

    def line(self, name: str, text: str) -> None:
        if name.startswith(("server-", "standby-")) and not self._verbose:
            if _START_BLOCK.match(text):
                self._starting.add(name)
            elif not text.startswith("  "):
                self._starting.discard(name)
            if name in self._starting or _ROUTINE.match(text):
                return
        with self._lock:
            print(f"{name:<{self._width}} | {text}", flush=True)

    def announce(self, text: str) -> None:
        self.line("pyps", text)
