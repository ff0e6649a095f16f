"""The universal invariants U1 to U3 under real threads; U4 is in tests/unit/core/test_shard_replay.py.

Four threads pull from and push to two real shards; what the shards recorded is then examined. U5 to U7 are in
test_every_mode.py, the law of conservation for every protocol in test_conservation_law.py. Versions are the papers'
timestamps T, staleness is their tau (Gupta, Zhang, Wang, ICDM 2016; Zhang, Gupta, Lian, Liu, IJCAI 2016).
"""

import threading
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import pytest

from pyps.core.arrays import Floats
from pyps.core.shard import Shard
from shards import Log, digest, gradient, make_shard, pull, replay, roster_of, run_together
from support import DEADLINE_SECONDS

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
                    self.all_pulled.wait(DEADLINE_SECONDS)
                values = parameters + random.standard_normal(shard.length).astype(np.float32)
                # Every tenth gradient is poisoned, every fifth is sent twice.
                if sequence % 10 == 9:
                    values[-1] = np.nan
                sent = gradient(values, worker_id=worker_id, sequence=sequence, base_version=version)
                for _ in range(2 if sequence % 5 == 0 else 1):
                    shard.push(sent, roster=roster_of(WORKERS))


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


def test_the_workers_got_in_each_others_way(training, shard):
    assert max(event.receipt.staleness for event in training.log.pushes(shard.shard_id)) >= WORKERS - 1


def test_u1_staleness_is_not_negative_and_versions_grow_by_one(training, shard):
    assert all(event.receipt.staleness >= 0 for event in training.log.pushes(shard.shard_id))
    before_and_after = [
        (event.receipt.version_before, event.receipt.version_after) for event in training.log.applied(shard.shard_id)
    ]
    assert before_and_after == [(version, version + 1) for version in range(APPLIED)]
    for index in range(WORKERS):
        seen = training.versions[str(index), shard.shard_id]
        assert seen == sorted(seen)


def test_u2_every_pull_is_bit_for_bit_one_version(training, shard):
    digests = replay(training.log, fresh_shard(shard.shard_id, shard.rule.name))
    torn = [version for version, seen in training.seen[shard.shard_id] if digests[version] != seen]
    assert torn == []


def test_u3_every_finite_push_is_applied_exactly_once_under_retry(training, shard):
    applied = [(event.gradient.worker_id, event.gradient.sequence) for event in training.log.applied(shard.shard_id)]
    finite = [(str(index), s) for index in range(WORKERS) for s in range(ROUNDS) if s % 10 != 9]
    assert sorted(applied) == sorted(finite)


def test_u2_a_shard_without_a_log_is_never_read_amid_an_update():
    """All gradients are ones, so at version v each parameter is -v. Kernels run long without the interpreter's lock."""
    shard, ones = make_shard(np.zeros(300_000)), np.ones(300_000, np.float32)

    def pusher(worker_id: str) -> None:
        for sequence in range(ROUNDS):
            shard.push(gradient(ones, worker_id=worker_id, sequence=sequence), roster=roster_of(2))

    def reader() -> None:
        while shard.version < 2 * ROUNDS:
            for version, parameters in (pull(shard), shard.read(lambda version, values: (version, values.copy()))):
                assert (parameters == -version).all()

    run_together([lambda: pusher("a"), lambda: pusher("b"), reader, reader])
