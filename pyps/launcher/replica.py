"""The workers of a job, each a replica of one or more processes: how they end and are restarted."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pyps.launcher.environment import JobSettings, worker_name, workers_noun
from pyps.launcher.process import ChildProcess


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
