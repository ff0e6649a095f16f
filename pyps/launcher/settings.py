"""What a job consists of, and how long its parts may take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pyps.launcher.output import counted


@dataclass(frozen=True)
class JobSettings:
    """What a job consists of."""

    # What each worker runs.
    command: tuple[str, ...]
    num_servers: int = 1
    # Workers of the run; with parts each of them is a replica of so many processes.
    num_workers: int = 1
    # Processes in each replica, which find each other through torch.distributed; None for plain workers.
    num_parts: int | None = None
    # How often a worker that failed, or a replica that lost a process, is started again.
    restarts_max: int = 0
    # The run's name; one is made where none is given.
    run_id: str = ""
    # The servers continue a checkpoint, whose run they hold then.
    resume: bool = False
    # Flags that every server gets, and one list more for each of them.
    server_flags: tuple[str, ...] = ()
    each_server_flags: tuple[tuple[str, ...], ...] = ()
    # Flags of `pyps coordinate`; None for a job without a coordinator.
    coordinator_flags: tuple[str, ...] | None = None
    # What somebody may do once the server of that name has died, in a sentence.
    after_a_death: Callable[[str], str] = lambda name: ""
    # How long a server may take to serve, and workers and servers to end after they were asked to.
    start_seconds: float = 60.0
    worker_stop_seconds: float = 10.0
    server_stop_seconds: float = 30.0
    # How long the other processes of a replica that lost one may take to see it for themselves.
    replica_end_seconds: float = 10.0
    # How long they may go on after one of them that finished, before somebody is told.
    replica_early_seconds: float = 60.0
    # How long a coordinator may outlive the workers: it tells how the run ended.
    coordinator_end_seconds: float = 15.0

    @property
    def num_processes(self) -> int:
        """Processes in each worker, 1 in a plain one."""
        return self.num_parts or 1

    def workers_in_words(self) -> str:
        """How many workers, as "3 workers" or "2 replicas of 2 processes"."""
        words = counted(self.num_workers, workers_noun(self.num_processes))
        return f"{words} of {self.num_processes} processes" if self.num_processes > 1 else words

    def process_name(self, index: int, rank: int) -> str:
        """What a process of a worker is called on the terminal: "worker-0", or "replica-0.1" among several."""
        name = worker_name(index, self.num_processes)
        return f"{name}.{rank}" if self.num_processes > 1 else name


def workers_noun(num_processes: int) -> str:
    """What a worker of so many processes is called."""
    return "replica" if num_processes > 1 else "worker"


def worker_name(index: int, num_processes: int) -> str:
    """The name of a worker in the run: "worker-0", or "replica-0" where it consists of several processes."""
    return f"{workers_noun(num_processes)}-{index}"
