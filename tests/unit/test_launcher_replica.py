"""What the launcher makes of the ends of processes: real ones, without servers."""

import os
import queue
import re
import signal
import sys
from collections.abc import Callable, Iterator

import pytest

from pyps.launcher import JobSettings
from pyps.launcher.job import Replicas
from pyps.launcher.process import ChildProcess
from support import wait_until

# Programs of a process: how it ends, or what it takes to end it.
FINISHES = "pass"
FAILS = "import sys; sys.exit(3)"
# One that waits for its end, and one that ends on nothing but SIGKILL.
WAITS = "import signal; print('ready', flush=True); signal.pause()"
STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True)\nwhile 1: signal.pause()"
)
# One that ends with status 7 on SIGUSR1, unless SIGTERM kills it first.
ENDS_ON_SIGUSR1 = (
    "import os, signal; signal.signal(signal.SIGUSR1, lambda *_: os._exit(7))\n"
    "print('ready', flush=True); signal.pause()"
)

# The program of a process, by the index of its worker, its number in it and the life.
Programs = Callable[[int, int, int], str]


class World:
    """Replicas whose processes run given programs; `next_end` reports one end to them, as a job does."""

    def __init__(self, settings: JobSettings, programs: Programs, *, never_joined: tuple[str, ...] = ()) -> None:
        self.said: list[str] = []
        self.expected_fewer: list[str] = []
        self.ready: list[str] = []
        self._settings = settings
        self._programs = programs
        self._never_joined = never_joined
        self._lives = [0] * settings.num_workers
        self._ends: queue.SimpleQueue[ChildProcess] = queue.SimpleQueue()
        self._children: list[ChildProcess] = []
        self.replicas = Replicas(
            settings, start=self._start, announce=self.said.append, expect_fewer=self._expect_fewer
        )
        for _ in range(settings.num_workers):
            self.replicas.add()

    def next_end(self, *, may_restart: bool = True) -> ChildProcess:
        child = self._ends.get(timeout=60)
        self.replicas.child_ended(child, may_restart=may_restart)
        return child

    def wait_until_ready(self, name: str) -> None:
        wait_until(lambda: name in self.ready, what=f"{name} runs")

    def close(self) -> None:
        for child in self._children:
            child.signal(signal.SIGKILL)
        wait_until(lambda: not any(child.running for child in self._children), what="the end of all")

    def _start(self, index: int) -> list[ChildProcess]:
        life, self._lives[index] = self._lives[index], self._lives[index] + 1
        children = [
            ChildProcess(
                self._settings.process_name(index, rank),
                [sys.executable, "-c", self._programs(index, rank, life)],
                environment=os.environ,
                on_line=lambda name, line: self.ready.append(name),
                on_end=self._ends.put,
            )
            for rank in range(self._settings.num_processes)
        ]
        self._children += children
        return children

    def _expect_fewer(self, name: str) -> bool:
        self.expected_fewer.append(name)
        return name in self._never_joined


@pytest.fixture
def world() -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(programs: Programs, *, never_joined: tuple[str, ...] = (), **settings: float | int | None) -> World:
        # The seconds of a test that does not say how long are far away.
        seconds = {"replica_end_seconds": 600.0, "worker_stop_seconds": 600.0}
        one = World(JobSettings(("python",), **(seconds | settings)), programs, never_joined=never_joined)
        worlds.append(one)
        return one

    yield make
    for one in worlds:
        one.close()


def without_seconds(lines: list[str]) -> list[str]:
    return [re.sub(r" after \d+\.\d s", "", line) for line in lines]


def test_a_replica_that_loses_a_process_is_one_failure_however_the_others_end(world):
    one = world(lambda index, rank, life: [WAITS, FAILS, FINISHES][rank], num_workers=1, num_parts=3)
    one.wait_until_ready("replica-0.0")
    one.next_end(), one.next_end()
    assert without_seconds(one.said) == ["replica-0 ends: its process replica-0.1 ended with status 3."]
    assert not one.replicas.over

    one.replicas.children[0].signal(signal.SIGTERM)
    one.next_end()

    assert len(one.said) == 1
    assert one.replicas.over


def test_the_failure_says_how_many_others_go_on_and_they_do(world):
    one = world(lambda index, rank, life: FAILS if (index, rank) == (1, 0) else WAITS, num_workers=3, num_parts=2)
    one.next_end()

    assert without_seconds(one.said) == [
        "replica-1 ends: its process replica-1.0 ended with status 3; 2 of 3 replicas go on."
    ]
    assert sum(child.running for child in one.replicas.children) == 5


def test_the_others_get_time_to_see_it_for_themselves(world):
    one = world(lambda index, rank, life: [ENDS_ON_SIGUSR1, FAILS][rank], num_parts=2)
    one.wait_until_ready("replica-0.0")
    one.next_end()

    one.replicas.check_deadlines()
    one.replicas.children[0].signal(signal.SIGUSR1)

    assert one.next_end().returncode == 7


@pytest.mark.parametrize(
    ("program", "number", "said"),
    [
        (WAITS, signal.SIGTERM, []),
        (STUBBORN, signal.SIGKILL, ["replica-0.0 did not end within 0 s and is killed."]),
    ],
)
def test_a_process_that_outlives_a_failure_is_ended_by_sigterm_and_then_sigkill(world, program, number, said):
    seconds = {"replica_end_seconds": 0.0, "worker_stop_seconds": 0.0}
    one = world(lambda index, rank, life: [program, FAILS][rank], num_parts=2, **seconds)
    one.wait_until_ready("replica-0.0")
    one.next_end()

    one.replicas.check_deadlines()
    if program == STUBBORN:
        assert one.replicas.children[0].running
        one.replicas.check_deadlines()

    assert one.next_end().returncode == -number
    # The process's end is no failure of its own.
    assert one.said[1:] == said


def test_a_process_that_finished_long_before_the_others_is_announced_once(world):
    one = world(lambda index, rank, life: [WAITS, FINISHES][rank], num_parts=2, replica_early_seconds=0.0)
    one.replicas.check_deadlines()
    assert one.said == []
    one.next_end()

    one.replicas.check_deadlines(), one.replicas.check_deadlines()

    assert one.said == ["replica-0.1 ended with status 0 0 s ago, and the others of replica-0 have not."]
    assert one.replicas.children[0].running, "it may have something left to do"


def test_processes_that_finish_together_are_announced_as_one(world):
    one = world(lambda index, rank, life: FINISHES, num_parts=2, replica_early_seconds=600.0)
    one.next_end()
    one.replicas.check_deadlines()
    one.next_end()

    one.replicas.check_deadlines()

    assert without_seconds(one.said) == ["replica-0 finished."]


def test_a_replica_is_started_again_once_all_of_it_has_ended(world):
    one = world(lambda index, rank, life: FINISHES if life else [WAITS, FAILS][rank], num_parts=2, restarts_max=1)
    first_life = one.replicas.children
    one.wait_until_ready("replica-0.0")
    one.next_end()
    assert one.replicas.children == first_life
    first_life[0].signal(signal.SIGTERM)
    one.next_end()
    assert not set(one.replicas.children) & set(first_life)
    assert not one.replicas.over

    one.next_end(), one.next_end()

    assert one.replicas.over
    assert without_seconds(one.said) == [
        "replica-0 ends: its process replica-0.1 ended with status 3.",
        "replica-0 is started again (restart 1 of 1).",
        "replica-0 finished.",
    ]


def test_each_worker_is_started_again_so_often_and_no_more(world):
    one = world(lambda index, rank, life: FAILS, num_workers=1, restarts_max=2)
    one.next_end(), one.next_end(), one.next_end()

    assert one.replicas.over
    assert without_seconds(one.said) == [
        "worker-0 ended with status 3 and is started again (restart 1 of 2).",
        "worker-0 ended with status 3 and is started again (restart 2 of 2).",
        "worker-0 ended with status 3.",
    ]


def test_nothing_is_started_again_without_a_run_to_join(world):
    one = world(lambda index, rank, life: FAILS, restarts_max=2)
    one.next_end(may_restart=False)

    assert one.replicas.over


def test_servers_expect_one_worker_fewer_when_a_replica_has_ended_for_good(world):
    one = world(
        lambda index, rank, life: FAILS if index == 0 else WAITS,
        num_workers=2,
        num_parts=2,
        restarts_max=1,
        never_joined=("replica-0",),
    )
    one.next_end(), one.next_end()
    assert not one.expected_fewer, "it comes back"

    one.next_end(), one.next_end()

    assert one.expected_fewer == ["replica-0"]
    assert one.said[-1] == "replica-0 never joined: the servers expect it no more."


@pytest.mark.timeout(60)
def test_a_second_ctrl_c_may_follow_at_once(world, monkeypatch):
    one = world(lambda index, rank, life: WAITS)
    [child] = one.replicas.children
    passed_on = []

    def killpg(group: int, number: int) -> None:
        passed_on.append(number)
        if number == signal.SIGTERM:
            # As the handler of a signal does that comes now, in the same thread.
            child.signal(signal.SIGKILL)

    with monkeypatch.context() as patched:
        patched.setattr(os, "killpg", killpg)
        child.signal(signal.SIGTERM)

    assert passed_on == [signal.SIGTERM, signal.SIGKILL]
