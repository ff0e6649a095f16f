"""The universal invariants U1 to U7 (algorithm notes 1.4) for every protocol, policy and rule, one worker and four.

A mode is a small cluster in virtual time around two real shards: unequal workers, noisy gradients. U6, that one
worker is serial training, compares bits with a loop that calls the rule's kernel and nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest

from pyps.core.aggregation import PROTOCOLS
from pyps.core.arrays import Floats, aligned_copy
from pyps.core.gradient import Codec
from pyps.core.receipt import Outcome, Reason
from pyps.core.shard import Shard
from pyps.core.shard_state import ShardState
from pyps.core.staleness import POLICIES
from pyps.core.update_rule import WeightedGradient
from pyps.core.update_rules import RULES, validate
from pyps.simulation.timing import lognormal
from pyps.simulation.worker import Computed, Step, WorkerPlan
from shards import Completed, Pulled, Pushed, digest, gradient, replay, roster
from simulated import Cluster, cluster, name, noisy

PROTOCOL_TEXTS = (
    *("async", "softsync:n=1", "softsync:n=2", "hardsync", "hardsync:weighting=equal", "backup:b=0", "backup:b=1"),
    *("ssp:s=0", "ssp:s=2", "ssp:s=0,strict_bsp=true", "serial", "asgd", "asgd:mutex=shard"),
)
POLICY_TEXTS = (
    *("none", "divide", "divide_plus_one", "constant", "per_update", "exponential:beta=0.2", "polynomial:a=0.5"),
    *("hinge:a=2,b=1", "drop:spread=3"),
)
STEPS = 8
LENGTHS = (5, 12)
RATE = 0.05


@dataclass(frozen=True)
class Mode:
    """One cell of the matrix."""

    protocol: str
    policy: str
    rule: str
    workers: int

    def __str__(self) -> str:
        return f"{self.protocol}-{self.policy}-{self.rule}-{self.workers}"


def modes() -> Iterator[Mode]:
    for protocol, policy, rule, workers in itertools.product(PROTOCOL_TEXTS, POLICY_TEXTS, RULES, (1, 4)):
        if not (protocol == "backup:b=1" and workers == 1):
            yield Mode(protocol, policy, rule, workers)


def first_parameters() -> list[Floats]:
    return [np.random.default_rng(length).standard_normal(length).astype(np.float32) for length in LENGTHS]


def settings_of(rule: str) -> Mapping[str, float]:
    decay = {"weight_decay": 0.01} if "weight_decay" in RULES[rule].settings else {}
    return {"learning_rate": RATE, **decay}


@dataclass
class Training:
    """A cluster of the mode, and what its workers were given."""

    run: Cluster
    # (shard_id, version, digest of the parameters) of every step.
    seen: list[tuple[int, int, str]] = field(default_factory=list)


def train(mode: Mode) -> Training:
    seen: list[tuple[int, int, str]] = []

    def compute(step: Step) -> Computed:
        seen.extend((shard_id, step.versions[shard_id], digest(values)) for shard_id, values in step.parameters.items())
        return noisy(step)

    # The third worker is slow, so that staleness, late gradients and waits all come up.
    plans = [
        WorkerPlan(name(index), lognormal(3.0 if index == 2 else 1.0, sigma=0.2), steps=STEPS)
        for index in range(mode.workers)
    ]
    run = cluster(
        mode.protocol,
        staleness=mode.policy,
        parameters=first_parameters(),
        workers=plans,
        compute=compute,
        rule=mode.rule,
        settings=settings_of(mode.rule),
        seed=1,
    )
    return Training(run.run(), seen)


@cache
def serial_training(rule_name: str) -> tuple[bytes, ...]:
    """The parameters of one worker's steps, by the kernel in a plain loop: no shard, no protocol, no policy."""
    rule, settings = RULES[rule_name], validate(rule_name, settings_of(rule_name))
    parameters = [aligned_copy(values) for values in first_parameters()]
    slots = [rule.make_slots(length, settings) for length in LENGTHS]
    # The worker's own random numbers: its plan draws the time of each step, then noise for its gradients.
    random, timing = np.random.default_rng([1, 0]), lognormal(sigma=0.2)
    for number in range(STEPS):
        timing(number, random)
        held = {shard_id: values.copy() for shard_id, values in enumerate(parameters)}
        gradients = noisy(Step("a", number, held, {}, random)).gradients
        for shard_id, values in enumerate(parameters):
            weighted = [WeightedGradient(gradients[shard_id].tobytes(), Codec.FLOAT32, 1.0)]
            rate = settings["learning_rate"]
            rule.apply(values, slots[shard_id], weighted, rate=rate, version=number, hyperparameters=settings)
    return tuple(values.tobytes() for values in parameters)


def test_the_matrix_holds_every_protocol_policy_and_rule() -> None:
    assert {text.partition(":")[0] for text in PROTOCOL_TEXTS} == {*PROTOCOLS} - {"sandblaster"}  # takes no push
    assert {text.partition(":")[0] for text in POLICY_TEXTS} == {kind.name for kind in POLICIES.values()}


@pytest.mark.parametrize("mode", list(modes()), ids=str)
def test_a_mode_keeps_the_universal_invariants(mode: Mode) -> None:
    training = train(mode)
    run = training.run
    for shard_id, shard in enumerate(run.shards):
        assert shard.version > 0
        check_versions(run, shard_id)
        check_replay_and_pulls(training, shard_id)
        check_duplicates(run, shard_id)
        check_not_finite(shard)
    if mode.workers == 1:
        finals = tuple(shard.state().parameters.tobytes() for shard in run.shards)
        assert finals == serial_training(mode.rule), "U6: one worker is not bit-identical to serial training"


@pytest.mark.parametrize("protocol", PROTOCOL_TEXTS)
def test_u5_plain_sgd_is_the_sum_of_its_gradients(protocol: str) -> None:
    """theta = theta_0 - alpha * sum of w g in any order, w the weight told in the receipt of the gradient's update."""
    run = cluster(
        protocol, parameters=first_parameters(), workers=4, compute=noisy, settings={"learning_rate": RATE}, seed=2
    ).run(seconds=10.5)
    for shard_id, first in enumerate(first_parameters()):
        total, waiting = np.zeros(first.size), []
        for pushed in run.log.pushes(shard_id):
            if pushed.receipt.outcome != Outcome.REJECTED:
                waiting.append(np.frombuffer(pushed.gradient.payload, np.float32))
            if pushed.receipt.outcome == Outcome.APPLIED:
                # Equal shares: everybody's is that of the gradient that completed the update.
                total += pushed.receipt.weight * np.sum(waiting, axis=0, dtype=np.float64)
                waiting = []
        np.testing.assert_allclose(run.parameters(shard_id), first - RATE * total, rtol=1e-5, atol=1e-6)


def check_versions(run: Cluster, shard_id: int) -> None:
    """U1: staleness is never negative, and versions grow by one per update."""
    version, completed = 0, False
    for event in run.log.events[shard_id]:
        if isinstance(event, Pushed):
            receipt = event.receipt
            assert receipt.staleness >= 0
            assert receipt.version_after - receipt.version_before == (receipt.outcome == Outcome.APPLIED)
            # Between two pushes the version moves only where workers left whom a round waited for.
            assert receipt.version_before > version if completed else receipt.version_before == version
            version, completed = receipt.version_after, False
        elif isinstance(event, Pulled):
            assert event.version >= version
        completed = completed or isinstance(event, Completed)


def check_replay_and_pulls(training: Training, shard_id: int) -> None:
    """U4: the log gives the same bits again; U2: every pull was one of its versions, bit for bit."""
    run = training.run
    replayed = run.fresh_shard(shard_id)
    digests = replay(run.log, replayed)
    assert same(run.shards[shard_id].state(), replayed.state())
    assert replayed.version == len(digests) - 1
    torn = [version for seen, version, of_pull in training.seen if seen == shard_id and digests[version] != of_pull]
    assert torn == []


def check_duplicates(run: Cluster, shard_id: int) -> None:
    """U3: a push that comes again is answered as before and changes nothing."""
    shard = run.shards[shard_id]
    before = shard.state()
    last = {pushed.gradient.worker_id: pushed for pushed in run.log.pushes(shard_id)}
    for pushed in last.values():
        again = shard.push(pushed.gradient, roster=pushed.roster)
        assert again == pushed.receipt._replace(duplicate=True)
    assert same(before, shard.state())


def check_not_finite(shard: Shard) -> None:
    """U7: NaN anywhere is refused, and nothing changes."""
    before = shard.state()
    values = np.ones(shard.length, np.float32)
    values[-1] = np.nan
    receipt = shard.push(
        gradient(values, worker_id="a", sequence=10_000, base_version=shard.version), roster=roster("a")
    )
    assert (receipt.outcome, receipt.reason) == (Outcome.REJECTED, Reason.NOT_FINITE)
    assert same(before, shard.state())


def same(one: ShardState, other: ShardState) -> bool:
    """Whether two states are equal to the last bit, what waits included."""

    def bits(state: ShardState) -> tuple[object, ...]:
        slots = {slot_name: slot.tobytes() for slot_name, slot in state.slots.items()}
        return state.version, state.parameters.tobytes(), slots, state.ledger, state.pending, state.examples

    return bits(one) == bits(other)
