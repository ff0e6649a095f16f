"""The gate of steps in a run: who may begin an epoch ahead, and that calls of many threads are taken one by one."""

import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from pyps.core.pacing import Free, WorkerClock
from shards import RunDriver
from support import DEADLINE_SECONDS


@pytest.mark.parametrize(
    ("protocol", "ahead"),
    [("async", 1), ("asgd", 1), ("softsync:n=1", 1), ("hardsync", 0), ("backup:b=1", 0), ("ssp:s=1", 0), ("serial", 0)],
)
def test_free_workers_begin_an_epoch_ahead_where_nobody_waits_for_anothers_steps(protocol, ahead):
    assert RunDriver("a", "b", protocol=protocol).run._epochs_ahead() == ahead


class Crowded(Free):
    """Notes whether it was ever asked while it was still being asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = self.overlaps = 0

    def asks(self, version: int) -> bool:
        return True

    def _ready(self, waiting: list[WorkerClock]) -> list[WorkerClock]:
        before = self.asked
        for _ in range(2000):
            self.overlaps += self.asked != before
        self.asked += 1
        return waiting


def test_events_of_many_threads_happen_at_the_gate_one_at_a_time():
    driver, pacer = RunDriver("a", "b", "c", "d"), Crowded()
    rounds, together = driver.run.rounds, Barrier(4)
    rounds.at_gate(rounds.steps.replace, pacer, quorum=0, at_work=[], version=0)

    def live(name: str) -> None:
        together.wait(DEADLINE_SECONDS)
        for clock in range(50):
            driver.may_proceed(name, clock)
            rounds.at_gate(rounds.steps.advanced, clock)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(live, "abcd"))
    finally:
        sys.setswitchinterval(before)
    assert (pacer.asked > 200, pacer.overlaps) == (True, 0)
