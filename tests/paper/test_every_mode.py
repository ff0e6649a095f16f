"""What holds under every protocol, policy and rule and only the shards themselves can show, in virtual time.

tests/integration/test_modes_matrix.py runs all pairs on real servers, and examines receipts, counts and update logs.
Here are, for each value of each axis: every pull is one version bit for bit (U2), no state changes where a push comes
again (U3) or holds NaN (U7), what waits included, and one worker is a loop that calls the rule's kernel and nothing
else (U6); and the sum of the gradients for every protocol (U5). Algorithm notes, 1.4.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from pyps.core.arrays import Floats, aligned_copy
from pyps.core.protocols import PROTOCOLS
from pyps.core.receipt import Outcome, Reason
from pyps.core.rules import RULES, validate
from pyps.core.shard import Shard
from pyps.core.staleness import POLICIES
from pyps.simulation.simulation import Computed, Step, WorkerPlan, lognormal
from pyps_wire.codecs import FLOAT32
from shards import digest, everything, gradient, replay, roster
from simulated import Cluster, cluster, name, noisy

PROTOCOL_TEXTS = (
    *("async", "softsync:n=1", "softsync:n=2", "hardsync", "hardsync:weighting=equal", "backup:b=0", "backup:b=1"),
    *("hardsync:weighting=by_speed,clip=median", "backup:b=1,grace=0.5,clip=median"),
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
    protocol: str = "softsync:n=2"
    policy: str = "divide"
    rule: str = "adam"
    workers: int = 4


def modes(workers: int) -> Iterator[Mode]:
    """Every value of every axis, with the others at their defaults."""
    yield from (Mode(policy=policy, workers=workers) for policy in POLICY_TEXTS)
    yield from (Mode(rule=rule, workers=workers) for rule in RULES)
    for protocol in PROTOCOL_TEXTS:
        if not (protocol.startswith("backup:b=1") and workers == 1):
            yield Mode(protocol, workers=workers)


def first_parameters() -> list[Floats]:
    return [np.random.default_rng(length).standard_normal(length).astype(np.float32) for length in LENGTHS]


def settings_of(rule: str) -> Mapping[str, float]:
    decay = {"weight_decay": 0.01} if "weight_decay" in RULES[rule].settings else {}
    return {"learning_rate": RATE, **decay}


@dataclass
class Training:
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
            bound = rule.bind(values, slots[shard_id], settings)
            numbers = [(gradients[shard_id].tobytes(), FLOAT32, 1.0)]
            bound.apply(numbers, rate=settings["learning_rate"], version=number)
    return tuple(values.tobytes() for values in parameters)


def test_u2_u3_u4_u7_of_four_workers_under_every_protocol_policy_and_rule():
    assert {text.partition(":")[0] for text in PROTOCOL_TEXTS} == {*PROTOCOLS} - {"sandblaster"}  # takes no push
    assert {text.partition(":")[0] for text in POLICY_TEXTS} == {kind.name for kind in POLICIES.values()}
    for mode in modes(workers=4):
        training = train(mode)
        assert len(training.seen) == len(LENGTHS) * 4 * STEPS, mode
        for shard_id, shard in enumerate(training.run.shards):
            assert shard.version > 0, mode
            check_replay_and_pulls(training, shard_id, mode)
            check_duplicates(training.run, shard_id, mode)
            check_not_finite(shard, mode)


def test_u6_one_worker_under_every_protocol_policy_and_rule_is_the_kernel_in_a_loop():
    for mode in modes(workers=1):
        finals = tuple(shard.state().parameters.tobytes() for shard in train(mode).run.shards)
        assert finals == serial_training(mode.rule), mode


def test_u5_plain_sgd_is_the_sum_of_its_gradients_under_every_protocol():
    """theta = theta_0 - alpha * sum of w g in any order, w the weight in the receipt of the gradient's update.

    Clipping gives each gradient a weight of its own.
    """
    for protocol in (text for text in PROTOCOL_TEXTS if "clip" not in text):
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
            expected = first - RATE * total
            np.testing.assert_allclose(run.parameters(shard_id), expected, rtol=1e-5, atol=1e-6, err_msg=protocol)


def check_replay_and_pulls(training: Training, shard_id: int, mode: Mode) -> None:
    """U4: the log gives the same bits again; U2: every pull was one of its versions, bit for bit."""
    run = training.run
    replayed = run.fresh_shard(shard_id)
    digests = replay(run.log, replayed)
    assert everything(run.shards[shard_id]) == everything(replayed), mode
    assert replayed.version == len(digests) - 1
    torn = [version for seen, version, of_pull in training.seen if seen == shard_id and digests[version] != of_pull]
    assert torn == [], mode


def check_duplicates(run: Cluster, shard_id: int, mode: Mode) -> None:
    """U3: a push that comes again is answered as before and changes nothing."""
    shard = run.shards[shard_id]
    before = everything(shard)
    last = {pushed.gradient.worker_id: pushed for pushed in run.log.pushes(shard_id)}
    for pushed in last.values():
        again = shard.push(pushed.gradient, roster=pushed.roster).receipt
        assert again == pushed.receipt._replace(duplicate=True), mode
    assert everything(shard) == before, mode


def check_not_finite(shard: Shard, mode: Mode) -> None:
    """U7: NaN anywhere is refused, and nothing changes."""
    before = everything(shard)
    for where in (0, shard.length - 1):
        values = np.ones(shard.length, np.float32)
        values[where] = np.nan
        sent = gradient(values, worker_id="a", sequence=10_000 + where, base_version=shard.version)
        receipt = shard.push(sent, roster=roster("a")).receipt
        assert (receipt.outcome, receipt.reason) == (Outcome.REJECTED, Reason.NOT_FINITE), mode
    assert everything(shard) == before, mode
