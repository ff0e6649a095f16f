"""A job: servers and workers on this machine, from their start to their end."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from pyps.launcher.environment import Group, JobSettings, own_folders, visible_gpus, worker_environment, worker_name
from pyps.launcher.ports import free_port
from pyps.launcher.process import COORDINATOR, SUPERSEDED, ChildProcess, Coordinator
from pyps.launcher.replica import Replicas

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
        return self._start_child(name, [sys.executable, "-m", "pyps", "serve", *flags], environment)

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
        command = [sys.executable, "-m", "pyps", "coordinate", *flags]
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
