"""The clock and the verdict of experiments/model_parallel.py, with times of the work that are given, not measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments import model_parallel as experiment
from experiments.model_parallel import Point, Proof
from experiments.model_parallel_dense import Dense
from experiments.model_parallel_machines import (
    Received,
    Sent,
    Stopwatch,
    Wires,
    Worked,
    compute,
    replay,
    work_seconds,
)
from experiments.model_parallel_patches import Patches

# A message of 10 bytes holds each of its lines for 3 seconds.
WIRES = Wires(bytes_per_second=10, message_seconds=2)
MESSAGE = 3.0


# The clock.


def test_work_goes_on_while_messages_wait_for_their_senders_line() -> None:
    traces = [
        [Sent(1, "a", 10), Sent(1, "b", 10), Worked("long")],
        [Received(0, "a"), Worked("short"), Received(0, "b"), Worked("short")],
    ]

    assert replay(traces, {"short": 1, "long": 4}, WIRES) == 2 * MESSAGE + 1


def test_two_messages_to_one_machine_come_one_after_the_other() -> None:
    traces = [[Received(1, "a"), Received(2, "a")], [Worked("short"), Sent(0, "a", 10)], [Sent(0, "a", 20)]]

    # The longer one is first, from 0 to 4; that from second 1 follows it.
    assert replay(traces, {"short": 1}, WIRES) == 4 + MESSAGE


def test_a_minibatch_ends_with_its_slowest_machine() -> None:
    """P5."""
    traces = [[Worked("short")], [Worked("short"), Worked("long")]]

    assert replay(traces, {"short": 1, "long": 4}, WIRES) == work_seconds(traces, {"short": 1, "long": 4}) == 5


# The points.


def given_seconds(net: Dense | Patches, machines: tuple[int, ...]) -> list[Point]:
    """Points of a network whose every work takes a millisecond, whatever it is."""
    stopwatch = Stopwatch()
    traces = {count: compute(net.parts(count), stopwatch).traces for count in machines}
    return experiment.points_of("net", traces, dict.fromkeys(stopwatch.samples, 1e-3))


def test_points_have_each_pair_of_wires_and_are_relative_to_one_machine() -> None:
    points = given_seconds(Dense((8, 8, 8), minibatch=2), (1, 2, 4))

    factors = {(point.bandwidth_factor, point.message_factor) for point in points}
    assert factors == {(a, b) for a in experiment.FACTORS for b in experiment.FACTORS}
    assert all(point.speed_up == 1 and point.messages == 0 for point in points if point.machines == 1)
    stated = {p.machines: p for p in points if p.bandwidth_factor == p.message_factor == 1}
    # Up: states of a layer and the softmax's sums; down: the layer's gradients. To each other part.
    assert [stated[count].messages for count in (2, 4)] == [3 * 2 * 1, 3 * 4 * 3]
    # Each of two examples has 8 states and 8 gradients that go to 1 or 3 others, and 2 numbers a part for the softmax.
    assert [stated[count].bytes for count in (2, 4)] == [4 * 2 * (16 + 4) * 1, 4 * 2 * (16 + 8) * 3]
    for count in (2, 4):
        by_wires = {(p.bandwidth_factor, p.message_factor): p.speed_up for p in points if p.machines == count}
        assert by_wires[0.3, 3] < by_wires[1, 1] < by_wires[3, 0.3]


# The verdict.


def points_with(dense: list[float], local: list[float]) -> list[Point]:
    """Points of the stated scenario, and misleading ones of another."""
    points = []
    for name, speeds in (("dense", dense), ("local", local)):
        for machines, speed in zip(experiment.MACHINES, speeds, strict=True):
            point = Point(name, machines, 1.0, 1.0, 1 / speed, 1 / machines, 0, 0, speed)
            points += [point, replace(point, message_factor=3.0, speed_up=100 / speed)]
    return points


RISING = [1, 2, 4, 7, 10, 15, 14]
HUMP = [1, 1.5, 2, 2.5, 2, 1.5, 1]


@pytest.mark.parametrize(
    ("dense", "local", "passed"),
    [
        (HUMP, RISING, [True, True, True, True]),
        ([1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4], RISING, [False, True, True, True]),
        ([1, 1.2, 1.4, 1.6, 1.8, 2, 1.5], RISING, [False, True, True, True]),
        ([1, 1.5, 2, 2.5, 2.4, 2.3, 2.3], RISING, [True, False, True, True]),
        (HUMP, [1, 2, 4, 7, 10, 9, 20], [True, True, False, True]),
        (HUMP, [1, 2, 3, 4, 4.5, 4.9, 5], [True, True, True, False]),
    ],
    ids=["as in the paper", "never pays", "peak too late", "no decline", "local stops at 16", "local gains too little"],
)
def test_the_verdict_holds_the_stated_scenario_against_each_threshold(dense, local, passed) -> None:
    assert [claim.passed for claim in experiment.judge_speed(points_with(dense, local))] == passed


PROOF = Proof("dense", 2, deviation=1e-15, deviation_float32=1e-7, repeated=0, own_shards=True, servers=1)


@pytest.mark.parametrize(
    ("proof", "stages", "passed"),
    [
        (PROOF, [True], [True, True, True, True]),
        (replace(PROOF, deviation=2e-6), [True], [False, True, True, True]),
        (PROOF, [True, False], [True, False, True, True]),
        (replace(PROOF, repeated=1), [True], [True, True, False, True]),
        (replace(PROOF, own_shards=False), [True], [True, True, True, False]),
    ],
    ids=["exact", "another gradient", "other bits", "twice", "another's shard"],
)
def test_the_verdict_holds_each_invariant_on_its_own(proof, stages, passed) -> None:
    assert [claim.passed for claim in experiment.judge_proofs([PROOF, proof], stages)] == passed


def test_the_networks_of_the_experiment_prove_exact_on_a_few_machines() -> None:
    small = {
        "dense": Dense((20, 16, 12, 30), minibatch=4),
        "local": Patches(image=(12, 12), maps=2, num_layers=3, window=5, minibatch=4),
    }

    for name, net in small.items():
        proof = experiment.prove(name, net, 4)
        assert 0 < proof.deviation <= 1e-12
        assert proof.deviation < proof.deviation_float32 <= experiment.DEVIATION_MAX
        assert (proof.repeated, proof.own_shards) == (0, True)
    assert experiment.stages_are_identical(small["dense"], 3)


def test_both_networks_have_as_many_parameters_and_operations_as_each_other() -> None:
    dense, local = experiment.DENSE, experiment.LOCAL

    assert local.num_parameters == pytest.approx(dense.num_parameters, rel=0.02)
    assert local.operations == pytest.approx(dense.operations, rel=0.02)
