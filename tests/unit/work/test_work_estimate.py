"""How long a pass still takes: from measured speeds, whoever has become slow (algorithm notes, E5)."""

from __future__ import annotations

import heapq
import random

import pytest

from pyps.work import Leased, WorkQueue
from pyps.work.estimate import Occupation, seconds_left
from work_crews import begin, coordinated, plain


def test_what_is_pending_flows_to_whoever_is_free():
    assert seconds_left(100, [Occupation(10.0)], copy_seconds=None) == 10.0
    assert seconds_left(100, [Occupation(10.0), Occupation(30.0)], copy_seconds=None) == 2.5
    # The second is free after 2 s, when 20 are done; the rest takes both.
    assert seconds_left(100, [Occupation(10.0), Occupation(10.0, 20)], copy_seconds=None) == 2.0 + 80 / 20


def test_the_last_portion_counts_where_there_are_no_copies():
    slow = Occupation(1.0, 50)
    assert seconds_left(10, [Occupation(10.0), slow], copy_seconds=None) == 50.0
    assert seconds_left(10, [Occupation(10.0), slow], copy_seconds=5.0) == 1.0 + 5.0


def test_a_worker_that_is_late_takes_as_long_again():
    assert seconds_left(0, [Occupation(10.0, 50, 2.0)], copy_seconds=None) == 3.0
    assert seconds_left(0, [Occupation(10.0, 50, 40.0)], copy_seconds=None) == 40.0


def test_nobody_is_there():
    assert seconds_left(10, [], copy_seconds=None) == -1.0


def test_nothing_is_known_before_the_first_portion_and_nothing_is_left_at_the_end():
    queue = plain(6, 3)
    assert queue.progress(0.0).seconds_left == -1.0
    answer = queue.lease("a", 1, now=0.0)
    assert queue.progress(1.0).seconds_left == -1.0
    queue.deliver("a", 1, [answer.lease_id], example_count=3, now=3.0)
    assert queue.progress(3.0).seconds_left == pytest.approx(3.0)
    assert queue.progress(3.0).workers[0].examples_per_second == 1.0
    answer = queue.lease("a", 1, now=3.0)
    assert queue.progress(4.0).seconds_left == pytest.approx(2.0)
    queue.deliver("a", 1, [answer.lease_id], example_count=3, now=6.0)
    assert queue.progress(6.0).seconds_left == 0.0


def simulated(queue: WorkQueue, speeds: dict[str, float], *, look_at: float) -> tuple[float, float]:
    """Runs the present pass in virtual time: the time left as told at `look_at`, and as it was."""
    told, now, coordinated_work = None, 0.0, queue.spec.coordinated
    events = [(0.0, name, None) for name in speeds]
    waiting: list[str] = []
    while True:
        now, name, leased = heapq.heappop(events)
        if told is None and now >= look_at:
            told = queue.progress(look_at).seconds_left
        if leased is not None:
            granted = not coordinated_work or queue.claim(name, 1, leased.lease_id, now=now).granted
            if granted:
                queue.deliver(
                    *(name, 1, [leased.lease_id]),
                    stage_id=leased.lease_id if coordinated_work else 0,
                    example_count=leased.portion.num_examples,
                    now=now,
                )
        progress = queue.progress(now)
        if progress.done == progress.num_portions:
            assert told is not None
            return told, now - look_at
        waiting.append(name)
        for other in waiting[:]:
            answer = queue.lease(other, 1, pass_=None if coordinated_work else 0, now=now)
            if isinstance(answer, Leased):
                waiting.remove(other)
                heapq.heappush(events, (now + answer.portion.num_examples / speeds[other], other, answer))


def crew(seed: int) -> dict[str, float]:
    """E5: 20 workers of unequal speed, two of them eight times as slow."""
    chance = random.Random(seed)
    speeds = {f"w{index:02}": 10 * 2.718281828 ** (0.2 * chance.gauss(0, 1)) for index in range(20)}
    for slow in ("w03", "w11"):
        speeds[slow] /= 8
    return speeds


SEEDS = (0, *(pytest.param(seed, marks=pytest.mark.extended) for seed in range(1, 6)))


@pytest.mark.parametrize("share", [0.5, 0.75])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_estimate_holds_with_two_workers_slowed_eightfold(seed, share):
    speeds = crew(seed)
    ideal = 4000 / sum(speeds.values())
    queue = coordinated(4000)
    begin(queue, num_portions=200)
    told, was = simulated(queue, speeds, look_at=share * ideal)
    assert told == pytest.approx(was, rel=0.25)
