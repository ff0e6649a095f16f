"""A job: servers and workers on this machine, from their start to their end."""

from __future__ import annotations

import contextlib
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
    START_SECONDS,
    Group,
    JobSettings,
    own_flags,
    spelled,
    visible_gpus,
    worker_environment,
    worker_name,
    workers_noun,
)
from pyps.launcher.process import COORDINATOR, RESTARTS_MAX, SUPERSEDED, ChildProcess, Coordinator

# -P: the current folder may be a clone, where the package of this name has no kernels.
PYPS = (sys.executable, "-P", "-m", "pyps")
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Well-known services are below.
PORT_MIN = 10_000
PORT_ATTEMPTS = 100


def free_port(*, but: Collection[int] = ()) -> int:
    """Return a port that a listener on every address, as torch's store, can bind, and that is none of `but`.

    If possible it is below the range from which the system takes ports, so that it stays free until it is used.
    """
    try:
        end = int(EPHEMERAL_RANGE.read_text(encoding="utf-8").split()[0])
    except (OSError, ValueError, IndexError):
        end = 0
    for _ in range(PORT_ATTEMPTS if end > PORT_MIN else 0):
        with contextlib.suppress(OSError):
            if (port := _bound(PORT_MIN + secrets.randbelow(end - PORT_MIN))) not in but:
                return port
    while (port := _bound(0)) in but:
        pass
    return port


def _bound(port: int) -> int:
    """Return the port that a listener on every address gets; the system chooses one for 0."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    with socket.create_server(("", port), family=family, dualstack_ipv6=dual) as probe:
        bound: int = probe.getsockname()[1]
    return bound


# How long servers may take to end beyond the time in which they drain.
STOP_SPARE_SECONDS = 10.0
# A signal that comes sooner after another is the same one: a program around this one passes on what its terminal sends.
SIGNALS_APART_SECONDS = 1.0
# How long a coordinator may outlive the workers, to report the run's end.
COORDINATOR_END_SECONDS = 15.0


class JobError(Exception):
    """The job cannot go on, in one sentence."""


class ServerAddresses(NamedTuple):
    data: str
    control: str
    metrics: str


class Job:
    """Servers on free ports and their workers; as a context manager it leaves no process behind.

    The caller drives it: `start()`, then `wait(seconds)` until `done`, then `stop()`. Coordinators are restarted,
    servers from their checkpoints, and workers as often as the settings allow.
    """

    def __init__(
        self,
        settings: JobSettings,
        *,
        on_line: Callable[[str, str], None],
        announce: Callable[[str], None],
        expect_fewer: Callable[[str], bool] = lambda worker_id: False,
    ) -> None:
        """Prepare the job.

        Args:
            settings: The job's settings.
            on_line: Gets the name of a child and a line of its output.
            announce: Gets a sentence about each event of the job.
            expect_fewer: Called with each worker that ended for good while others go on. Returns whether the worker
                never joined; then it has made the servers expect one worker fewer.
        """
        self.settings = settings
        self.servers: list[ChildProcess] = []
        # By the index of the server in whose place each serves when that has ended, with its addresses.
        self._standbys: dict[int, tuple[ChildProcess, ServerAddresses]] = {}
        self.coordinator: Coordinator | None = None
        self.addresses: list[ServerAddresses] = []
        # Where workers look addresses up that change with a takeover; there as long as the job.
        self._lookup: tempfile.TemporaryDirectory[str] | None = None
        # By a server's name, its newest checkpoint at its last end, and how often it was started again from that.
        self._restarts: dict[str, tuple[Path | None, int]] = {}
        self.run_id = settings.run_id or f"run-{secrets.token_hex(4)}"
        self.signal_number: int | None = None
        self.server_died = False
        self._on_line = on_line
        self._announce = announce
        self._replicas = Replicas(settings, start=self._start_worker, announce=announce, expect_fewer=expect_fewer)
        self._stopping = False
        self._workers_gone_at: float | None = None
        self._gpus: tuple[str, ...] = ()
        # The secret of each worker by its name, the same in all of its lives.
        self.keys: defaultdict[str, str] = defaultdict(partial(secrets.token_hex, 16))
        # At which the processes of replicas meet.
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
                self.servers.append(self._start_server(f"server-{index}", ready_file))
            self.addresses = self._wait_until_they_serve(self.servers, ready_files)
            if self.settings.standby:
                self._start_standbys(Path(folder))
                self._lookup = tempfile.TemporaryDirectory(prefix="pyps-run-")
                self._note_addresses()
        if self.settings.coordinator_flags is not None:
            self._refuse_after_a_signal()
            self.coordinator = Coordinator(self._start_coordinator, self._announce)
        for _ in range(self.settings.num_workers):
            self._refuse_after_a_signal()
            self._replicas.add()

    @property
    def workers(self) -> list[ChildProcess]:
        return self._replicas.children

    @property
    def done(self) -> bool:
        """Return whether all workers and the coordinator have ended, a server died, or a signal arrived."""
        return (
            self.server_died
            or self.signal_number is not None
            or (self.coordinator is not None and self.coordinator.failed)
            or (self._replicas.over and self._coordinator_is_over())
        )

    def wait(self, seconds: float) -> None:
        """Wait for an end or a signal, at most so long, and announce it."""
        with contextlib.suppress(queue.Empty):
            child = self._events.get(timeout=seconds)
            if child is not None and not self._stopping:
                self._report_end(child)
        if not self._stopping:
            self._replicas.check_deadlines()

    def stop(self) -> None:
        """End what still runs, workers before servers, by SIGTERM and then SIGKILL."""
        self._stopping = True
        self._stop([*self._coordinators(), *self.workers], seconds=self.settings.worker_stop_seconds)
        # The standbys first: nobody is to go on.
        for servers in ([child for child, _ in self._standbys.values()], self.servers):
            self._stop(servers, seconds=self.settings.config.drain_seconds + STOP_SPARE_SECONDS)
        if self._lookup is not None:
            self._lookup.cleanup()

    def exit_status(self) -> int:
        """Return the exit status of the workers, or 128 and the number of a signal."""
        if self.signal_number is not None:
            return 128 + self.signal_number
        return self.exit_status_of_workers()

    @property
    def ended_badly(self) -> dict[str, int]:
        """Return the exit statuses, by name, of servers that failed, whose last state may not be saved."""
        return {server.name: server.returncode for server in self.servers if server.returncode}

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
        """End the job on SIGINT, SIGTERM and SIGHUP within the block.

        A second one kills the workers, and servers that keep no checkpoints; those that do say what they have not
        saved, and the third one kills them.
        """
        times: list[float] = []

        def handle(number: int, frame: FrameType | None) -> None:
            now = time.monotonic()
            if times and now - times[-1] < SIGNALS_APART_SECONDS:
                return
            times.append(now)
            if len(times) > 1:
                for child in [*self._coordinators(), *self.workers]:
                    child.signal(signal.SIGKILL)
                told = len(times) == 2 and self.settings.config.checkpoint_dir is not None
                for server in [*self.servers, *(child for child, _ in self._standbys.values())]:
                    server.signal(signal.SIGTERM if told else signal.SIGKILL)
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

    def _start_server(self, name: str, ready_file: Path | None, *more: str) -> ChildProcess:
        config = self.settings.config
        run_id = ["--run-id", self.run_id] if not config.resume or self.settings.run_id else []
        # Of a flag that is given twice the last one holds.
        flags = [
            *run_id,
            *self.settings.server_flags,
            *own_flags(config, name.replace("standby", "server"), ready_file),
            *more,
        ]
        return self._start_child(name, [*PYPS, "serve", *flags], {"PYTHONUNBUFFERED": "1"} | os.environ)

    def _start_standbys(self, folder: Path) -> None:
        names = [f"standby-{index}" for index in range(len(self.servers))]
        files = [folder / f"{name}.json" for name in names]
        started = [
            self._start_server(name, file, "--standby-of", server.data)
            for name, file, server in zip(names, files, self.addresses, strict=True)
        ]
        # Each is to be ended from here on, wherever it listens.
        self._standbys = {index: (child, ServerAddresses("", "", "")) for index, child in enumerate(started)}
        self._standbys = dict(enumerate(zip(started, self._wait_until_they_serve(started, files), strict=True)))

    @property
    def _places(self) -> Path | None:
        return None if self._lookup is None else Path(self._lookup.name) / "servers"

    @property
    def server_places(self) -> list[str]:
        """Return where the servers are, also after a takeover."""
        return [f"file:{self._places}"] if self._places else [server.data for server in self.addresses]

    def _note_addresses(self) -> None:
        if (places := self._places) is not None:
            new = places.with_suffix(".new")
            new.write_text("".join(f"{server.data}\n" for server in self.addresses), encoding="utf-8")
            new.replace(places)

    def _wait_until_they_serve(self, servers: list[ChildProcess], ready_files: list[Path]) -> list[ServerAddresses]:
        deadline = time.monotonic() + START_SECONDS
        while not all(file.exists() for file in ready_files):
            self._refuse_after_a_signal()
            for server in servers:
                if not server.running:
                    raise JobError(f"{server.name} {server.how_it_ended()} before it served; its last lines say why.")
            if time.monotonic() > deadline:
                raise JobError(f"The servers do not serve after {START_SECONDS:g} s.")
            self.wait(0.02)
        addresses = []
        for file in ready_files:
            ready = json.loads(file.read_text(encoding="utf-8"))
            addresses.append(ServerAddresses(ready["data"], ready["control"], ready["metrics"]))
            # A resumed server has the run of its checkpoint.
            self.run_id = ready["run_id"] or self.run_id
        return addresses

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
        return self._start_child(COORDINATOR, [*PYPS, "coordinate", *flags], {"PYTHONUNBUFFERED": "1"} | os.environ)

    def _coordinators(self) -> list[ChildProcess]:
        return [] if self.coordinator is None else [self.coordinator.child]

    def _coordinator_is_over(self) -> bool:
        """Return whether the coordinator has ended, or the job waits for it no longer."""
        if self.coordinator is None or self.coordinator.done:
            return True
        if all(worker.returncode != 0 for worker in self.workers):
            return True
        if self._workers_gone_at is None:
            self._workers_gone_at = time.monotonic()
        return time.monotonic() > self._workers_gone_at + COORDINATOR_END_SECONDS

    def _worker_environment(self, index: int, group: Group | None = None) -> dict[str, str]:
        return worker_environment(
            os.environ,
            index=index,
            count=self.settings.num_workers,
            data_addresses=self.server_places,
            control_addresses=[server.control for server in self.addresses],
            run_id=self.run_id,
            key=self.keys[worker_name(index, self.settings.num_processes)],
            gpus=self._gpus,
            group=group,
        )

    def _start_child(self, name: str, command: list[str], environment: dict[str, str]) -> ChildProcess:
        return ChildProcess(name, command, environment=environment, on_line=self._on_line, on_end=self._events.put)

    def _report_end(self, child: ChildProcess) -> None:
        if self.coordinator is not None and child is self.coordinator.child:
            self.coordinator.ended()
            return
        for index, (standby, addresses) in list(self._standbys.items()):
            server = self.servers[index]
            if child is standby:
                del self._standbys[index]
                self._announce(f"{child.name} {child.how_it_ended()}: {server.name} goes on without a standby.")
                return
            if child is server and standby.running:
                del self._standbys[index]
                self.servers[index], self.addresses[index] = standby, addresses
                self._note_addresses()
                self._announce(f"{child.name} {child.how_it_ended()}: {standby.name} goes on in its place.")
                return
        if child in self.servers:
            # With 0 it ends by --stop-after or --exit-when.
            if child.returncode != 0:
                self._replace_server(self.servers.index(child))
            return
        # A server that failed is started again, or its end, which comes next, is the run's.
        run_exists = all(server.returncode != 0 for server in self.servers)
        self._replicas.child_ended(child, may_restart=run_exists and not self.done)

    def _replace_server(self, index: int) -> None:
        """Start a server that failed again from its newest checkpoint; else the run is over."""
        server, settings = self.servers[index], self.settings
        if not self.addresses:
            self.server_died = True
            return
        ended, newest = f"{server.name} {server.how_it_ended()}", settings.newest_checkpoint(server.name)
        before, times = self._restarts.get(server.name, (None, 0))
        times = times if newest == before else 0
        if newest is None or times == RESTARTS_MAX:
            self.server_died = True
            often = f", {times} times since {newest}" if times else ""
            advice = settings.after_a_death(server.name)
            self._announce(f"{ended}{often}: the run cannot go on without its shards. {advice}".rstrip())
            return
        self._restarts[server.name] = newest, times + 1
        # Of the workers that are gone it hears no more.
        expected = max(0, settings.config.expected_workers - self._replicas.num_over)
        names = ("port", "control_port", "metrics_port")
        ports = {name: address.rpartition(":")[2] for name, address in zip(names, self.addresses[index], strict=True)}
        again = spelled({**ports, "expected_workers": str(expected), "resume": True})
        self.servers[index] = self._start_server(server.name, None, *again)
        # A coordinator's workers push nothing.
        resends = settings.config.resends and self.coordinator is None
        lacks = "workers send again what it lacks" if resends else "what came after it is lost"
        self._announce(f"{ended}; started again from its newest checkpoint; {lacks}.")

    def _stop(self, children: list[ChildProcess], *, seconds: float) -> None:
        for child in children:
            child.signal(signal.SIGTERM)
        if not self._wait_for_ends(children, seconds=seconds):
            kill(children, self._announce, seconds=seconds)
            self._wait_for_ends(children, seconds=seconds)

    def _wait_for_ends(self, children: list[ChildProcess], *, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while any(child.running for child in children):
            if time.monotonic() > deadline:
                return False
            self.wait(0.1)
        return True


@dataclass(eq=False)
class Replica:
    """One life of a worker: its processes, which end together."""

    name: str
    children: list[ChildProcess]
    # Earlier lives.
    num_restarts: int = 0
    # There will be no other life.
    over: bool = False
    # Processes that have ended, in order, with the time by the monotonic clock.
    ends: list[tuple[ChildProcess, float]] = field(default_factory=list)
    # When the others got SIGTERM after a failure, and whether SIGKILL followed.
    terminated_at: float | None = None
    killed: bool = False
    announced_early: bool = False

    @property
    def ended(self) -> bool:
        return len(self.ends) == len(self.children)

    @property
    def failed_at(self) -> float | None:
        return next((at for child, at in self.ends if child.returncode), None)


class Replicas:
    """All workers of a job: announces their ends, and restarts them as often as the settings allow."""

    def __init__(
        self,
        settings: JobSettings,
        *,
        start: Callable[[int], list[ChildProcess]],
        announce: Callable[[str], None],
        expect_fewer: Callable[[str], bool],
    ) -> None:
        """`start` starts the processes of a worker by its index; `expect_fewer` is as in `Job`."""
        self._settings = settings
        self._start = start
        self._announce = announce
        self._expect_fewer = expect_fewer
        self._all: list[Replica] = []
        self._started_at = time.monotonic()

    def add(self) -> None:
        index = len(self._all)
        self._all.append(Replica(worker_name(index, self._settings.num_processes), self._start(index)))

    @property
    def children(self) -> list[ChildProcess]:
        return [child for replica in self._all for child in replica.children]

    @property
    def num_over(self) -> int:
        return sum(replica.over for replica in self._all)

    @property
    def over(self) -> bool:
        return self.num_over == len(self._all)

    def child_ended(self, child: ChildProcess, *, may_restart: bool) -> None:
        """Announce the end of a process, and restart its worker if that is allowed and `may_restart` is set."""
        replica = next(one for one in self._all if child in one.children)
        first_failure = bool(child.returncode) and replica.failed_at is None
        replica.ends.append((child, time.monotonic()))
        if first_failure and len(replica.children) > 1:
            self._announce(f"{replica.name} ends: its process {self._end_of(child)}{self._others_go_on(replica)}.")
        if not replica.ended:
            return
        if may_restart and self._may_restart(replica):
            self._restart(replica)
        else:
            self._conclude(replica)

    def check_deadlines(self) -> None:
        """End processes that outlive a failed one of their worker, and announce those that outlive a finished one."""
        settings, now = self._settings, time.monotonic()
        for replica in self._all:
            if replica.ended or not replica.ends:
                continue
            running = [child for child in replica.children if child.running]
            if replica.failed_at is None:
                child, finished_at = replica.ends[0]
                if not replica.announced_early and now >= finished_at + settings.replica_early_seconds:
                    replica.announced_early = True
                    self._announce(
                        f"{child.name} ended with status 0 {settings.replica_early_seconds:g} s ago, and the others of "
                        f"{replica.name} have not."
                    )
            elif replica.terminated_at is None:
                if now >= replica.failed_at + settings.replica_end_seconds:
                    replica.terminated_at = now
                    for child in running:
                        child.signal(signal.SIGTERM)
            elif not replica.killed and now >= replica.terminated_at + settings.worker_stop_seconds:
                replica.killed = True
                kill(running, self._announce, seconds=settings.worker_stop_seconds)

    def _restart(self, replica: Replica) -> None:
        num_restarts, index = replica.num_restarts + 1, self._all.index(replica)
        # The failure of one of several processes was announced when it happened.
        who = f"{self._end_of(replica.children[0])} and" if len(replica.children) == 1 else replica.name
        self._announce(f"{who} is started again (restart {num_restarts} of {self._settings.restarts_max}).")
        self._all[index] = Replica(replica.name, self._start(index), num_restarts)

    def _conclude(self, replica: Replica) -> None:
        replica.over = True
        rest = self._others_go_on(replica)
        never_joined = bool(rest) and self._expect_fewer(replica.name)
        failed = replica.failed_at is not None
        if failed and len(replica.children) > 1:
            if never_joined:
                self._announce(f"{replica.name} never joined: the servers expect it no more.")
            return
        if never_joined:
            rest += " without it: it never joined, and the servers expect it no more"
        finished = f"{replica.name} finished{self._after()}"
        self._announce(f"{self._end_of(replica.children[0]) if failed else finished}{rest}.")

    def _others_go_on(self, replica: Replica) -> str:
        others = sum(self._goes_on(one) for one in self._all if one is not replica)
        noun = workers_noun(self._settings.num_processes)
        return f"; {others} of {len(self._all)} {noun}s go on" if others else ""

    def _goes_on(self, replica: Replica) -> bool:
        if replica.failed_at is None:
            return any(child.running for child in replica.children)
        return not replica.over and self._may_restart(replica)

    def _may_restart(self, replica: Replica) -> bool:
        return replica.failed_at is not None and replica.num_restarts < self._settings.restarts_max

    def _end_of(self, child: ChildProcess) -> str:
        return f"{child.name} {child.how_it_ended()}{self._after()}"

    def _after(self) -> str:
        return f" after {time.monotonic() - self._started_at:.1f} s"


def kill(children: list[ChildProcess], announce: Callable[[str], None], *, seconds: float) -> None:
    """Kill children that SIGTERM did not end within so many seconds."""
    for child in children:
        if child.running:
            announce(f"{child.name} did not end within {seconds:g} s and is killed.")
            child.signal(signal.SIGKILL)
