"""What holds under every protocol: the universal invariants U1 to U7, and the conservation law of staleness.

Four threads pull from and push to two real shards; what the shards recorded is then examined. U6 (one
worker is serial training) is in test_serial_training.py. Versions are the papers' timestamps T, staleness is
their tau (Gupta, Zhang, Wang, ICDM 2016; Zhang, Gupta, Lian, Liu, IJCAI 2016).
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest

from pyps.core.arrays import Floats
from pyps.core.receipt import Outcome, Reason
from pyps.core.shard import Shard
from shards import (
    JOIN_SECONDS,
    Log,
    Pulled,
    Pushed,
    crew,
    digest,
    gradient,
    make_shard,
    pull,
    push,
    replay,
    run_together,
)

WORKERS = 4
ROUNDS = 60
# Of different lengths, long enough for threads to meet.
LENGTHS = (50_000, 3_001)


def first_parameters(shard_id: int) -> Floats:
    return np.random.default_rng(shard_id).standard_normal(LENGTHS[shard_id]).astype(np.float32)


def fresh_shard(shard_id: int, rule: str = "adagrad", recorder: Log | None = None) -> Shard:
    return make_shard(
        first_parameters(shard_id),
        rule=rule,
        settings={"learning_rate": 0.01},
        policy="divide",
        shard_id=shard_id,
        recorder=recorder,
    )


@dataclass
class Training:
    """What four workers did to two shards, and what they saw."""

    log: Log = field(default_factory=Log)
    shards: list[Shard] = field(default_factory=list)
    # Makes sure that in the first round nobody pushes before all have pulled.
    all_pulled: threading.Barrier = field(default_factory=lambda: threading.Barrier(WORKERS))
    # By shard: (version, digest) of every pull.
    seen: dict[int, list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))
    # By worker and shard: the versions in the order in which the worker saw them.
    versions: dict[tuple[str, int], list[int]] = field(default_factory=lambda: defaultdict(list))

    def work(self, worker_id: str) -> None:
        random = np.random.default_rng(int(worker_id))
        for sequence in range(ROUNDS):
            for shard in self.shards:
                version, parameters = pull(shard, worker_id)
                self.seen[shard.shard_id].append((version, digest(parameters)))
                self.versions[worker_id, shard.shard_id].append(version)
                if sequence == 0:
                    self.all_pulled.wait(JOIN_SECONDS)
                values = parameters + random.standard_normal(shard.length).astype(np.float32)
                # Every tenth gradient is poisoned, every fifth is sent twice.
                if sequence % 10 == 9:
                    values[-1] = np.nan
                sent = gradient(values, worker_id=worker_id, sequence=sequence, base_version=version)
                for _ in range(2 if sequence % 5 == 0 else 1):
                    shard.push(sent, roster=crew(WORKERS))


@pytest.fixture(scope="module", params=["sgd", "adagrad"])
def training(request: pytest.FixtureRequest) -> Training:
    training = Training()
    for shard_id in range(len(LENGTHS)):
        training.shards.append(fresh_shard(shard_id, request.param, training.log))
        training.seen[shard_id] = []
    run_together([lambda worker_id=str(index): training.work(worker_id) for index in range(WORKERS)])
    return training


@pytest.fixture(params=range(len(LENGTHS)))
def shard(request: pytest.FixtureRequest, training: Training) -> Shard:
    return training.shards[request.param]


APPLIED = WORKERS * ROUNDS * 9 // 10


def test_the_workers_got_in_each_others_way(training: Training, shard: Shard) -> None:
    assert max(event.receipt.staleness for event in training.log.pushes(shard.shard_id)) >= WORKERS - 1


def test_u1_staleness_is_never_negative(training: Training, shard: Shard) -> None:
    assert all(event.receipt.staleness >= 0 for event in training.log.pushes(shard.shard_id))


def test_u1_versions_grow_by_exactly_one_per_update(training: Training, shard: Shard) -> None:
    before_and_after = [
        (event.receipt.version_before, event.receipt.version_after) for event in training.log.applied(shard.shard_id)
    ]
    assert before_and_after == [(version, version + 1) for version in range(APPLIED)]


def test_u1_no_worker_sees_a_version_fall(training: Training, shard: Shard) -> None:
    for index in range(WORKERS):
        seen = training.versions[str(index), shard.shard_id]
        assert seen == sorted(seen)


def test_u2_every_pull_is_bit_for_bit_one_version(training: Training, shard: Shard) -> None:
    digests = replay(training.log, fresh_shard(shard.shard_id, shard.rule.name))
    torn = [version for version, seen in training.seen[shard.shard_id] if digests[version] != seen]
    assert torn == []


def test_u3_every_finite_push_is_applied_exactly_once_under_retry(training: Training, shard: Shard) -> None:
    applied = [(event.gradient.worker_id, event.gradient.sequence) for event in training.log.applied(shard.shard_id)]
    finite = [(str(index), s) for index in range(WORKERS) for s in range(ROUNDS) if s % 10 != 9]
    assert sorted(applied) == sorted(finite)


def test_u4_replaying_the_log_gives_the_same_bits_in_parameters_and_slots(training: Training, shard: Shard) -> None:
    again = fresh_shard(shard.shard_id, shard.rule.name)
    replay(training.log, again)
    state, expected = again.state(), shard.state()
    assert state.parameters.tobytes() == expected.parameters.tobytes()
    assert {name: slot.tobytes() for name, slot in state.slots.items()} == {
        name: slot.tobytes() for name, slot in expected.slots.items()
    }


def test_u5_without_modulation_sgd_sums_the_gradients_in_any_order() -> None:
    random = np.random.default_rng(8)
    gradients = random.standard_normal((40, 100)).astype(np.float32)
    shard = make_shard(np.zeros(100), settings={"learning_rate": 0.1})
    for sequence in random.permutation(len(gradients)):
        push(shard, gradients[sequence], worker_id=str(sequence), sequence=int(sequence))
    expected = -0.1 * gradients.astype(np.float64).sum(axis=0)
    np.testing.assert_allclose(pull(shard)[1], expected, atol=1e-5)


def test_u7_a_poisoned_gradient_leaves_version_parameters_and_slots_unchanged() -> None:
    shard = fresh_shard(0)
    values = np.ones(LENGTHS[0], np.float32)
    push(shard, values)
    before = shard.state()
    values[-1] = np.inf
    receipt = push(shard, values, sequence=1)
    after = shard.state()
    assert (receipt.outcome, receipt.reason) == (Outcome.REJECTED, Reason.NOT_FINITE)
    assert replace(after, parameters=before.parameters, slots=before.slots) == before
    assert after.parameters.tobytes() == before.parameters.tobytes()
    assert after.slots["accumulator"].tobytes() == before.slots["accumulator"].tobytes()


# The conservation law. T is counted here from the order of the log; staleness is what the shard told.


@dataclass(frozen=True)
class Timed:
    """An event of a worker, and the number of updates recorded before it."""

    event: Pushed | Pulled
    time: int


def by_worker(events: list[Pushed | Pulled]) -> dict[str, list[Timed]]:
    timed: dict[str, list[Timed]] = defaultdict(list)
    time = 0
    for event in events:
        is_push = isinstance(event, Pushed)
        worker_id = event.gradient.worker_id if isinstance(event, Pushed) else event.worker_id
        timed[worker_id].append(Timed(event, time))
        time += is_push and event.receipt.outcome == Outcome.APPLIED
    return timed


def cycles(timed: list[Timed]) -> Iterator[tuple[Timed, Timed]]:
    """Yields each push with the pull before it; a pull whose gradient was refused belongs to no cycle."""
    for first, second in pairwise(timed):
        if isinstance(first.event, Pulled) and isinstance(second.event, Pushed):
            yield first, second


def test_the_staleness_of_all_gradients_is_conserved(training: Training, shard: Shard) -> None:
    """SUM(T_push - T_pull) = SUM(T_lastpush - T_firstpull) - SUM(T_pull[k+1] - T_push[k]), in integers."""
    told = from_the_log = 0
    for timed in by_worker(training.log.events[shard.shard_id]).values():
        pairs = list(cycles(timed))
        told += sum(pushed.event.receipt.staleness for _, pushed in pairs if isinstance(pushed.event, Pushed))
        span = pairs[-1][1].time - pairs[0][0].time
        between = sum(pulled.time - pushed.time for (_, pushed), (pulled, _) in pairwise(pairs))
        from_the_log += span - between
    assert told == from_the_log


@pytest.mark.parametrize("workers", [1, 2, 5, 30])
def test_workers_in_turn_have_a_staleness_of_their_number_less_one(workers: int) -> None:
    """mean(tau) -> (L - 1) / c with c = 1, exact where each pulls at once after its push."""
    shard = make_shard([0.0])
    held = dict.fromkeys(range(workers), 0)
    staleness = []
    for round_number in range(4):
        for worker in range(workers):
            receipt = push(shard, [1.0], worker_id=str(worker), sequence=round_number, base_version=held[worker])
            held[worker] = shard.version
            staleness.append(receipt.staleness)
    # In the first round worker k is k late; from then on all are L - 1 late.
    assert staleness == [*range(workers), *[workers - 1] * (3 * workers)]


@pytest.mark.parametrize("workers", [2, 5, 30])
def test_the_mean_staleness_does_not_depend_on_who_is_quick(workers: int) -> None:
    """The law in full: SUM(tau) = L*U - U - boundary, for any order of arrival."""
    random = np.random.default_rng(workers)
    # Some workers push a hundred times as often as others.
    speeds = 10.0 ** random.uniform(-1, 1, workers)
    order = random.choice(workers, size=2000, p=speeds / speeds.sum())
    shard = make_shard([0.0])
    held = dict.fromkeys(range(workers), 0)
    total = 0
    for sequence, worker in enumerate(int(index) for index in order):
        receipt = push(shard, [0.0], worker_id=str(worker), sequence=sequence, base_version=held[worker])
        held[worker] = shard.version
        total += receipt.staleness
    # What lies between the last pull of each worker and the end has not been told by any gradient yet.
    boundary = sum(shard.version - version for version in held.values())
    assert total == (workers - 1) * shard.version - boundary
