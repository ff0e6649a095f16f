"""The modes of the STT (DeepSpeech) documentation, chapter "Parallel Optimization".

Its "hybrid" is everybody else's synchronous training, here `hardsync`; its "synchronous" is one worker at a
time, here `serial`. The invariants H1 to H3 of the algorithm notes, section 2.1; H4 is in
tests/unit/core/test_protocols.py.
"""

import numpy as np
import pytest

from pyps.core.arrays import Floats
from pyps.simulation.event import Kind
from pyps.simulation.simulation import Computed, Step, WorkerPlan, fixed, lognormal, scripted
from shards import gradient, make_shard, pull, push, roster
from simulated import cluster, name, worker_plans

W = np.array([0.5, -1.25, 3.0], np.float32)
# Exact in float32 at learning rate 1, so that the order of two additions cannot show.
GRADIENT_N = np.array([0.25, 0.5, -1.0], np.float32)
GRADIENT_N_PLUS_1 = np.array([-0.125, 1.0, 0.5], np.float32)


def test_hybrid_moves_the_parameters_by_the_mean_of_both():
    """W + (D_n(W) + D_{n+1}(W)) / 2."""
    shard = make_shard(W, protocol="hybrid")
    shard.push(gradient(GRADIENT_N, worker_id="gpu-n"), roster=roster("gpu-n", "gpu-n+1"))
    shard.push(gradient(GRADIENT_N_PLUS_1, worker_id="gpu-n+1"), roster=roster("gpu-n", "gpu-n+1"))
    assert pull(shard)[1].tolist() == (W - (GRADIENT_N + GRADIENT_N_PLUS_1) / 2).tolist()


def test_asynchronous_workers_that_pulled_the_same_parameters_both_move_them():
    """The result is W + D_{n+1}(W) + D_n(W): the second is evaluated "at the wrong location"."""
    shard = make_shard(W)
    push(shard, GRADIENT_N, worker_id="gpu-n", base_version=0)
    assert push(shard, GRADIENT_N_PLUS_1, worker_id="gpu-n+1", base_version=0).staleness == 1
    assert pull(shard)[1].tolist() == (W - GRADIENT_N_PLUS_1 - GRADIENT_N).tolist()


# H1: hybrid(G, b) is one worker with the minibatch G * b.

GPUS, BATCH, STEPS, LENGTH = 4, 8, 50, 65


def examples(step: int, gpu: int) -> tuple[Floats, Floats]:
    random = np.random.default_rng([step, gpu])
    return random.standard_normal((BATCH, LENGTH)), random.standard_normal(BATCH)


def regression_gradient(theta: Floats, inputs: Floats, targets: Floats) -> Floats:
    """The mean gradient of (x theta - y)^2 over the examples."""
    errors = inputs.astype(np.float32) @ theta - targets.astype(np.float32)
    return (2 / targets.size * errors @ inputs.astype(np.float32)).astype(np.float32)


def compute(step: Step) -> Computed:
    inputs, targets = examples(step.number, ord(step.worker_id) - ord("a"))
    return Computed({0: regression_gradient(step.parameters[0], inputs, targets)}, examples=BATCH)


@pytest.mark.parametrize(("rule", "rate"), [("sgd", 0.01), ("momentum", 0.003), ("adam", 0.01)])
def test_h1_four_gpus_with_a_minibatch_each_are_one_worker_with_all_four(rule, rate):
    """Over fifty steps within 1e-5, the first within 1e-6; `adam` is the chapter's optimizer."""
    settings = {"learning_rate": rate}
    plans = worker_plans(GPUS, lognormal(sigma=0.3), steps=STEPS)
    parameters = [np.zeros(LENGTH)]
    hybrid = cluster("hybrid", parameters=parameters, workers=plans, compute=compute, rule=rule, settings=settings)

    serial = make_shard(parameters[0], rule=rule, settings=settings)
    hybrid_versions, serial_versions = [hybrid.run(seconds=0).parameters()], []
    for step in range(STEPS):
        hybrid.run(pushes=GPUS * (step + 1))
        hybrid_versions.append(hybrid.parameters())
        serial_versions.append(pull(serial)[1])
        inputs, targets = (np.concatenate(both) for both in zip(*(examples(step, g) for g in range(GPUS)), strict=True))
        values = regression_gradient(serial_versions[-1], inputs, targets)
        serial.push(gradient(values, sequence=step, base_version=step), roster=roster())
    serial_versions.append(pull(serial)[1])
    gaps = [
        float(np.linalg.norm(mine - theirs) / max(1e-12, np.linalg.norm(theirs)))
        for mine, theirs in zip(hybrid_versions, serial_versions, strict=True)
    ]
    assert gaps[1] <= 1e-6
    assert max(gaps) < 1e-5


def test_h2_h3_all_staleness_is_zero_and_a_round_takes_as_long_as_its_slowest_worker():
    seconds = np.random.default_rng(4).uniform(0.5, 2.0, (GPUS, 20))
    plans = [WorkerPlan(name(index), scripted(list(times)), steps=20) for index, times in enumerate(seconds)]
    run = cluster("hybrid", workers=plans).run()
    # H2: everybody computes on the same version.
    assert run.staleness() == [0] * (20 * GPUS)
    ends = [
        event.time for event in run.events(Kind.PUSH) if event.receipt and event.receipt.version_after > event.version
    ]
    assert np.diff([0.0, *ends]) == pytest.approx(seconds.max(axis=0))


def throughput(protocol: str, *, slowest: float) -> float:
    plans = [*worker_plans(3), WorkerPlan("z", fixed(slowest))]
    return cluster(protocol, workers=plans).run(seconds=300.0).simulation.num_taken / 300


@pytest.mark.parametrize(
    ("protocol", "share"), [("hybrid", 1 / 3), ("asynchronous", (3 + 1 / 3) / 4), ("synchronous", 4 / 6)]
)
def test_a_straggler_three_times_as_slow(protocol, share):
    """It cuts hybrid to a third, since all idle until it is done; asynchronous keeps 83 %: only it is slow."""
    assert throughput(protocol, slowest=3.0) / throughput(protocol, slowest=1.0) == pytest.approx(share, rel=0.02)
