"""A job: servers and workers on this machine, from their start to their end."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from pyps.launcher.environment import (
    Group,
    JobSettings,
    own_folders,
    visible_gpus,
    worker_environment,
    worker_name,
    workers_noun,
)
from pyps.launcher.process import COORDINATOR, SUPERSEDED, ChildProcess, Coordinator

# -P: the current folder may be a clone, where the package of this name has no kernels.
PYPS = (sys.executable, "-P", "-m", "pyps")
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Well-known services are below.
PORT_MIN = 10_000
PORT_ATTEMPTS = 100


def free_port(*, but: Collection[int] = ()) -> int:
    """Return a port without a listener that is none of `but`.

    It is below the range that the system gives away, where there is room, so it stays free until it is used.
    """
    try:
        end = int(EPHEMERAL_RANGE.read_text(encoding="utf-8").split()[0])
    except (OSError, ValueError, IndexError):
        end = 0
    for _ in range(PORT_ATTEMPTS if end > PORT_MIN else 0):
        port = PORT_MIN + secrets.randbelow(end - PORT_MIN)
        if port not in but and _is_free(port):
            return port
    while True:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("0.0.0.0", 0))
            any_port: int = probe.getsockname()[1]
        if any_port not in but:
            return any_port


def _is_free(port: int) -> bool:
    """Return whether a listener on every address, as torch's store, could bind it."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind((address, port))
        except OSError as error:
            # A machine without IPv6 fails otherwise.
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
    return True


# What servers get beyond the time in which they drain.
STOP_SPARE_SECONDS = 10.0
# Takes the name of a child and a line of its output.
LineHandler = Callable[[str, str], None]


class JobError(Exception):
    """The job cannot go on, in one sentence."""


class ServerAddresses(NamedTuple):
    data: str
    control: str


class Job:
    """Servers on free ports and their workers; as a context manager it leaves no process behind.

    The caller drives it: `start()`, then `wait(seconds)` until `done`, then `stop()`. Coordinators are restarted, and
    workers as often as the settings allow.
    """

    def __init__(
        self,
        settings: JobSettings,
        *,
        on_line: LineHandler,
        announce: Callable[[str], None],
        without: Callable[[str], bool] = lambda worker_id: False,
    ) -> None:
        """Prepare the job.

        Args:
            settings: Its settings.
            on_line: Takes the output of children.
            announce: Takes what happens to them, in sentences.
            without: Called for each worker that ended for good while others go on; returns whether it never joined,
                so that servers were made to expect one fewer.
        """
        self.settings = settings
        self.servers: list[ChildProcess] = []
        self.coordinator: Coordinator | None = None
        self.addresses: list[ServerAddresses] = []
        self.run_id = settings.run_id or f"run-{secrets.token_hex(4)}"
        self.signal_number: int | None = None
        self.server_died = False
        self._on_line = on_line
        self._announce = announce
        self._replicas = Replicas(settings, start=self._start_worker, announce=announce, without=without)
        self._stopping = False
        self._workers_gone_at: float | None = None
        self._gpus: tuple[str, ...] = ()
        # By the worker's name, for all its lives.
        self._keys: defaultdict[str, str] = defaultdict(partial(secrets.token_hex, 16))
        # Where processes of replicas meet.
        self._ports: set[int] = set()
        # Children that ended, None for a signal; handlers of signals may use a SimpleQueue.
        self._events: queue.SimpleQueue[ChildProcess | None] = queue.SimpleQueue()

    def start(self) -> None:
        """Start the servers, wait until all of them serve, then start the workers."""
        self._gpus = visible_gpus(os.environ)
        self._check_command()
        with tempfile.TemporaryDirectory(prefix="pyps-run-") as folder:
            ready_files = [Path(folder) / f"server-{i}.json" for i in range(self.settings.num_servers)]
            for index, ready_file in enumerate(ready_files):
                self._refuse_after_a_signal()
                self.servers.append(self._start_server(index, ready_file))
            self._wait_until_servers_serve(ready_files)
        if self.settings.coordinator_flags is not None:
            self._refuse_after_a_signal()
            self.coordinator = Coordinator(self._start_coordinator, self._announce)
        for _ in range(self.settings.num_workers):
            self._refuse_after_a_signal()
            self._replicas.add()

    def key_of(self, name: str) -> str:
        """Return the secret of a worker, the same in all of its lives."""
        return self._keys[name]

    @property
    def workers(self) -> list[ChildProcess]:
        return self._replicas.children

    @property
    def done(self) -> bool:
        """Return whether all workers and the coordinator have ended, a server died, or a signal arrived."""
        if self.server_died or self.signal_number is not None:
            return True
        if self.coordinator is not None and self.coordinator.failed:
            return True
        return self._replicas.over and self._coordinator_is_over()

    def wait(self, seconds: float) -> None:
        """Wait for an end or a signal, at most so long, and announce it."""
        with contextlib.suppress(queue.Empty):
            child = self._events.get(timeout=seconds)
            if child is not None and not self._stopping:
                self._report_end(child)
        if not self._stopping:
            self._replicas.press()

    def stop(self) -> None:
        """End what still runs, workers before servers, by SIGTERM and then SIGKILL."""
        self._stopping = True
        self._stop([*self._coordinators(), *self.workers], seconds=self.settings.worker_stop_seconds)
        self._stop(self.servers, seconds=self.settings.config.drain_seconds + STOP_SPARE_SECONDS)

    def exit_status(self) -> int:
        """Return the exit status of the workers, or 128 and the number of a signal."""
        if self.signal_number is not None:
            return 128 + self.signal_number
        return self.exit_status_of_workers()

    @property
    def ended_badly(self) -> list[str]:
        """Return the names of servers that failed, whose last state may not be saved."""
        return [server.name for server in self.servers if server.returncode]

    def exit_status_of_workers(self) -> int:
        """Return 0 when all workers and the coordinator finished with 0 and no server died, else 1."""
        succeeded = bool(self.workers) and all(worker.returncode == 0 for worker in self.workers)
        coordinated = all(child.returncode in (0, SUPERSEDED) for child in self._coordinators())
        return 0 if succeeded and coordinated and not self.server_died else 1

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @contextlib.contextmanager
    def handle_signals(self) -> Iterator[None]:
        """End the job on SIGINT, SIGTERM and SIGHUP within the block; a second one kills all children."""

        def handle(number: int, frame: FrameType | None) -> None:
            if self.signal_number is not None:
                for child in [*self._coordinators(), *self.workers, *self.servers]:
                    child.signal(signal.SIGKILL)
            self.signal_number = number
            self._events.put(None)

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _check_command(self) -> None:
        if not self.settings.command:
            raise JobError("There is no worker command: write it behind --, as in `pyps run -- python train.py`.")
        path = self._worker_environment(0)["PATH"]
        if shutil.which(self.settings.command[0], path=path) is None:
            raise JobError(f"The worker command {self.settings.command[0]!r} is not on the PATH.")

    def _refuse_after_a_signal(self) -> None:
        if self.signal_number is not None:
            raise JobError("Interrupted while the job was starting.")

    def _start_server(self, index: int, ready_file: Path) -> ChildProcess:
        flags = ["--port", "0", "--control-port", "0", "--metrics-port", "0", "--ready-file", str(ready_file)]
        config, name = self.settings.config, f"server-{index}"
        flags += ["--lane-port", "off" if config.lane_port == "off" else "0"]
        if not config.resume or self.settings.run_id:
            flags += ["--run-id", self.run_id]
        # Of a flag that is given twice the last one holds.
        flags += [*self.settings.server_flags, *own_folders(config, name)]
        environment = {"PYTHONUNBUFFERED": "1"} | os.environ
        return self._start_child(name, [*PYPS, "serve", *flags], environment)

    def _wait_until_servers_serve(self, ready_files: list[Path]) -> None:
        deadline = time.monotonic() + self.settings.start_seconds
        while not all(file.exists() for file in ready_files):
            self._refuse_after_a_signal()
            for server in self.servers:
                if not server.running:
                    raise JobError(f"{server.name} {server.how_it_ended()} before it served; its last lines say why.")
            if time.monotonic() > deadline:
                raise JobError(f"The servers do not serve after {self.settings.start_seconds:g} s.")
            self.wait(0.02)
        for file in ready_files:
            ready = json.loads(file.read_text(encoding="utf-8"))
            self.addresses.append(ServerAddresses(ready["data"], ready["control"]))
            # A resumed server has the run of its checkpoint.
            self.run_id = ready["run_id"] or self.run_id

    def _start_worker(self, index: int) -> list[ChildProcess]:
        settings = self.settings
        groups: list[Group] | list[None] = [None]
        if settings.num_parts is not None:
            # The last life's port may still be in use.
            port = free_port(but=self._ports)
            self._ports.add(port)
            groups = [Group(rank, settings.num_parts, port) for rank in range(settings.num_parts)]
        return [
            self._start_child(
                settings.process_name(index, rank), list(settings.command), self._worker_environment(index, group)
            )
            for rank, group in enumerate(groups)
        ]

    def _start_coordinator(self) -> ChildProcess:
        assert self.settings.coordinator_flags is not None
        servers = ",".join(server.data for server in self.addresses)
        flags = ["--servers", servers, "--run-id", self.run_id, *self.settings.coordinator_flags]
        environment = {"PYTHONUNBUFFERED": "1"} | os.environ
        command = [*PYPS, "coordinate", *flags]
        return self._start_child(COORDINATOR, command, environment)

    def _coordinators(self) -> list[ChildProcess]:
        return [] if self.coordinator is None else [self.coordinator.child]

    def _coordinator_is_over(self) -> bool:
        """Return whether the job need not wait for the coordinator any longer."""
        if self.coordinator is None or self.coordinator.done:
            return True
        if all(worker.returncode != 0 for worker in self.workers):
            return True
        if self._workers_gone_at is None:
            self._workers_gone_at = time.monotonic()
        return time.monotonic() > self._workers_gone_at + self.settings.coordinator_end_seconds

    def _worker_environment(self, index: int, group: Group | None = None) -> dict[str, str]:
        return worker_environment(
            os.environ,
            index=index,
            count=self.settings.num_workers,
            data_addresses=[server.data for server in self.addresses],
            control_addresses=[server.control for server in self.addresses],
            run_id=self.run_id,
            key=self.key_of(worker_name(index, self.settings.num_processes)),
            gpus=self._gpus,
            group=group,
        )

    def _start_child(self, name: str, command: list[str], environment: dict[str, str]) -> ChildProcess:
        return ChildProcess(name, command, environment=environment, on_line=self._on_line, on_end=self._events.put)

    def _report_end(self, child: ChildProcess) -> None:
        if self.coordinator is not None and child is self.coordinator.child:
            self.coordinator.ended()
            return
        if child in self.servers:
            # With 0 it ends by --stop-after or --exit-when.
            if child.returncode != 0:
                self.server_died = True
            if child.returncode != 0 and self.addresses:
                self._announce(
                    f"{child.name} {child.how_it_ended()}: the run cannot go on without its shards."
                    f" {self.settings.after_a_death(child.name)}".rstrip()
                )
            return
        there_is_a_run = all(server.running for server in self.servers)
        self._replicas.ended(child, may_restart=there_is_a_run and not self.done)

    def _stop(self, children: list[ChildProcess], *, seconds: float) -> None:
        for child in children:
            child.signal(signal.SIGTERM)
        if self._wait_for_ends(children, seconds=seconds):
            return
        for child in children:
            if child.running:
                self._announce(f"{child.name} did not end within {seconds:g} s and is killed.")
                child.signal(signal.SIGKILL)
        self._wait_for_ends(children, seconds=seconds)

    def _wait_for_ends(self, children: list[ChildProcess], *, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while any(child.running for child in children):
            if time.monotonic() > deadline:
                return False
            self.wait(0.1)
        return True


@dataclass(eq=False)
class Life:
    """One life of a worker: its processes, which end together."""

    children: list[ChildProcess]
    # Processes that have ended, in order, with the time by the monotonic clock.
    ends: list[tuple[ChildProcess, float]] = field(default_factory=list)
    # When the others got SIGTERM after a failure, and whether SIGKILL followed.
    terminated_at: float | None = None
    killed: bool = False
    announced_early: bool = False

    @property
    def over(self) -> bool:
        return len(self.ends) == len(self.children)

    def first(self, *, failed: bool) -> tuple[ChildProcess, float] | None:
        """Return the first process that failed, or the first that finished, and when."""
        return next((end for end in self.ends if bool(end[0].returncode) == failed), None)

    @property
    def failed(self) -> bool:
        return self.first(failed=True) is not None

    def early(self, *, seconds: float) -> ChildProcess | None:
        """Return, once, a process that finished so long ago while others go on."""
        finished = self.first(failed=False)
        if finished is None or self.announced_early or self.failed or self.over:
            return None
        child, finished_at = finished
        self.announced_early = time.monotonic() >= finished_at + seconds
        return child if self.announced_early else None

    def press(self, *, end_seconds: float, stop_seconds: float) -> list[ChildProcess]:
        """End what is left after a failure, by SIGTERM and then SIGKILL; return what was killed just now."""
        failure, now = self.first(failed=True), time.monotonic()
        if failure is None or self.over:
            return []
        if self.terminated_at is None and now >= failure[1] + end_seconds:
            self.terminated_at = now
            self._signal(signal.SIGTERM)
        elif self.terminated_at is not None and not self.killed and now >= self.terminated_at + stop_seconds:
            self.killed = True
            return self._signal(signal.SIGKILL)
        return []

    def _signal(self, number: int) -> list[ChildProcess]:
        running = [child for child in self.children if child.running]
        for child in running:
            child.signal(number)
        return running


@dataclass(eq=False)
class Replica:
    """A worker and its present life; `over` once it has ended for good."""

    name: str
    life: Life
    num_restarts: int = 0
    over: bool = False


class Replicas:
    """All workers of a job: announces their ends, and restarts them as often as the settings allow."""

    def __init__(
        self,
        settings: JobSettings,
        *,
        start: Callable[[int], list[ChildProcess]],
        announce: Callable[[str], None],
        without: Callable[[str], bool],
    ) -> None:
        """`start` starts the processes of a worker by its index; `without` is as in `Job`."""
        self._settings = settings
        self._start = start
        self._announce = announce
        self._without = without
        self._all: list[Replica] = []
        self._started_at = time.monotonic()

    def add(self) -> None:
        index = len(self._all)
        name = worker_name(index, self._settings.num_processes)
        self._all.append(Replica(name, Life(self._start(index))))

    @property
    def children(self) -> list[ChildProcess]:
        return [child for replica in self._all for child in replica.life.children]

    @property
    def over(self) -> bool:
        return all(replica.over for replica in self._all)

    def ended(self, child: ChildProcess, *, may_restart: bool) -> None:
        """Act on the end of a process; `may_restart` where there is still a run to join."""
        replica = next(one for one in self._all if child in one.life.children)
        first_failure = bool(child.returncode) and not replica.life.failed
        replica.life.ends.append((child, time.monotonic()))
        if first_failure and len(replica.life.children) > 1:
            self._announce(f"{replica.name} ends: its process {self._end_of(child)}{self._others_go_on(replica)}.")
        if not replica.life.over:
            return
        if may_restart and self._may_come_back(replica):
            self._restart(replica)
        else:
            self._conclude(replica)

    def press(self) -> None:
        """End the processes that a failure left behind, and announce those that outlive a finished one."""
        stop_seconds = self._settings.worker_stop_seconds
        early_seconds = self._settings.replica_early_seconds
        for replica in self._all:
            early = replica.life.early(seconds=early_seconds)
            if early is not None:
                self._announce(
                    f"{early.name} ended with status 0 {early_seconds:g} s ago, and the others of {replica.name} "
                    "have not."
                )
            killed = replica.life.press(end_seconds=self._settings.replica_end_seconds, stop_seconds=stop_seconds)
            for child in killed:
                self._announce(f"{child.name} did not end within {stop_seconds:g} s and is killed.")

    def _restart(self, replica: Replica) -> None:
        children = replica.life.children
        # The failure of one of several was announced when it happened.
        who = f"{self._end_of(children[0])} and" if len(children) == 1 else replica.name
        self._announce(f"{who} is started again (restart {replica.num_restarts + 1} of {self._settings.restarts_max}).")
        replica.num_restarts += 1
        replica.life = Life(self._start(self._all.index(replica)))

    def _conclude(self, replica: Replica) -> None:
        replica.over = True
        rest = self._others_go_on(replica)
        missed = bool(rest) and self._without(replica.name)
        if replica.life.failed and len(replica.life.children) > 1:
            if missed:
                self._announce(f"{replica.name} never joined: the servers expect it no more.")
            return
        if missed:
            rest += " without it: it never joined, and the servers expect it no more"
        finished = f"{replica.name} finished{self._after()}"
        self._announce(f"{self._end_of(replica.life.children[0]) if replica.life.failed else finished}{rest}.")

    def _others_go_on(self, replica: Replica) -> str:
        others = sum(self._goes_on(one) for one in self._all if one is not replica)
        noun = workers_noun(self._settings.num_processes)
        return f"; {others} of {len(self._all)} {noun}s go on" if others else ""

    def _goes_on(self, replica: Replica) -> bool:
        if replica.life.failed:
            return not replica.over and self._may_come_back(replica)
        return any(child.running for child in replica.life.children)

    def _may_come_back(self, replica: Replica) -> bool:
        return replica.life.failed and replica.num_restarts < self._settings.restarts_max

    def _end_of(self, child: ChildProcess) -> str:
        return f"{child.name} {child.how_it_ended()}{self._after()}"

    def _after(self) -> str:
        return f" after {time.monotonic() - self._started_at:.1f} s"
