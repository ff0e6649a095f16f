"""What messages, pulls, codecs and failures do in virtual time, against sums made by hand."""

from collections import Counter

import numpy as np
import pytest

from pyps.core.arrays import Floats
from pyps.core.behaviour import Behaviour
from pyps.core.gradient import PayloadKind, PublishedReply
from pyps.core.published import Published
from pyps.core.rule_settings import RuleSettings
from pyps.simulation.event import Kind
from pyps.simulation.network import Network
from pyps.simulation.server import ServerPlan
from pyps.simulation.simulation import Computed, Failures, Simulation, Step, WorkerPlan, fixed, parse_timing, scripted
from pyps_wire.codecs import BFLOAT16, FLOAT32, INT8, TOPK
from pyps_wire.errors import InvalidArgument
from simulated import Cluster, cluster, noisy, ones, worker_plans


def times(run: Cluster, kind: Kind, worker_id: str = "a") -> list[float]:
    return [event.time for event in run.events(kind, worker_id)]


def test_messages_of_two_workers_pass_the_servers_nic_in_turn():
    # 100 bytes: 1 s through a worker's NIC, 2 s through the server's, 0.5 s on the way.
    network = Network(0.5, bytes_per_second=100.0, server_bytes_per_second=50.0)
    run = cluster(parameters=[np.zeros(25)], workers=2, network=network).run(seconds=20.0)

    # Both ask at 0.5; a's answer leaves the server from 0.5 to 2.5 and is there at 3, b's at 5. A second to compute.
    # a's push reaches the server from 4.5 on and is there at 6.5, at once answered: from 6.5 to 8.5, there at 9.
    assert times(run, Kind.PUSH)[:2] == [6.5, 12.5]
    # b's reaches it from 6.5 to 8.5, and its answer leaves after a's.
    assert times(run, Kind.PUSH, "b")[:2] == [8.5, 14.5]
    server = run.simulation.server
    assert (server.bytes_in, server.bytes_out) == (100 * 6, 100 * 7)


def test_a_slow_nic_of_a_worker_does_not_hold_up_the_servers():
    network = Network(0.0, bytes_per_second=10.0, server_bytes_per_second=100.0)
    run = cluster(parameters=[np.zeros(25)], workers=2, network=network).run(seconds=25.0)

    # 10 s down, 1 s of computation, 10 s up; the server's NIC takes 1 s a message.
    assert (times(run, Kind.PUSH), times(run, Kind.PUSH, "b")) == ([21.0], [22.0])


def test_a_worker_that_waits_for_a_round_asks_once_more_and_one_that_asks_for_steps_twice():
    def rounds(protocol: str) -> list[float]:
        network = Network(latency_seconds=1.0)
        return times(cluster(protocol, workers=2, compute=ones, network=network).run(seconds=30.0), Kind.PULL)[:3]

    # Asked at 0. An exchange: answer, computation, push.
    assert rounds("async") == [1.0, 4.0, 7.0]
    # Who completes the round has its answer; a waits, and its question reaches the server two messages later.
    assert rounds("hardsync") == [1.0, 6.0, 9.0]
    # Before each pull: the receipt, and Proceed there and back.
    assert rounds("ssp:s=2") == [3.0, 10.0, 17.0]


def test_pulls_wait_in_the_queue_of_pushes():
    server = ServerPlan(service_seconds=0.5, pull_seconds=0.25)
    run = cluster(workers=2, server=server).run(seconds=5.0)

    # Pulls at 0.25 and 0.5; pushes at 1.25 and 1.5 are handled by 1.75 and 2.25, then the pull of the first at 2.5.
    assert times(run, Kind.PULL)[:2] == [0.25, 2.5]
    assert times(run, Kind.PUSH)[:2] == [1.75, 4.0]
    assert times(run, Kind.PUSH, "b")[0] == 2.25


@pytest.mark.parametrize(("protocol", "period"), [("asgd", 6.0), ("asgd:mutex=shard", 3.0)])
def test_one_mutex_is_held_for_all_shards_of_a_push_and_of_a_pull(protocol, period):
    server = ServerPlan(service_seconds=2.0, pull_seconds=1.0)
    run = cluster(protocol, parameters=[[0.0], [0.0]], workers=4, server=server).run(seconds=200.0)

    # The shards are never free: each takes 3 s for a worker, both together 6 s.
    assert run.shards[0].version / 200 == pytest.approx(1 / period, rel=0.05)


@pytest.mark.parametrize("codec", [INT8, TOPK, BFLOAT16])
def test_what_a_codec_loses_is_in_the_next_push(codec):
    gradients = np.random.default_rng(1).standard_normal((6, 300)).astype(np.float32)

    def compute(step: Step) -> Computed:
        return Computed({0: gradients[step.number]})

    run = cluster(parameters=[np.zeros(300)], workers=[WorkerPlan("a", steps=6, codec=codec)], compute=compute).run()

    residual, total, num_bytes = np.zeros(300, np.float32), np.zeros(300, np.float32), 0
    for gradient in gradients:
        lost = np.empty_like(residual)
        payload = codec.encode_feedback(gradient, residual, lost)
        residual = lost if codec.stateful else residual
        total -= codec.decode(payload, 300)
        num_bytes += payload.nbytes
    assert run.parameters().tobytes() == total.tobytes()
    assert run.simulation.server.bytes_in == num_bytes < 6 * FLOAT32.max_bytes(300)


def test_pulls_follow_the_published_copy():
    held: list[Floats] = []

    def compute(step: Step) -> Computed:
        held.append(step.parameters[0])
        return Computed({0: step.random.standard_normal(100).astype(np.float32)})

    plan = WorkerPlan("a", steps=5, pull_codec=INT8)
    run = cluster(parameters=[np.ones(100)], workers=[plan], compute=compute, rule="adagrad").run()

    fresh, copy = run.fresh_shard(), np.ones(100, np.float32)
    published = Published(INT8, copy, version=0)

    def bring(version: int, values: Floats) -> None:
        reply = PublishedReply(INT8)
        published.bring(reply, values, version=version, held_version=version - 1, is_last=False)
        for payload in reply.payloads:
            INT8.add_into(payload, copy)

    for event, seen in zip(run.log.pushes(0), held, strict=True):
        assert seen.tobytes() == copy.tobytes()
        fresh.push(event.gradient, roster=event.roster)
        fresh.read(bring)
    assert not np.array_equal(copy, run.parameters())
    assert run.simulation.server.bytes_out == 400 + 4 * INT8.max_bytes(100)


def test_local_steps_push_deltas_which_add_up():
    def compute(step: Step) -> Computed:
        return Computed({0: np.full(1, 0.5, np.float32)}, kind=PayloadKind.DELTA)

    settings = RuleSettings.make("sgd", ({"learning_rate": 1.0},), (PayloadKind.DELTA,))
    plans = worker_plans(2, steps=3)
    simulation = Simulation([np.zeros(1, np.float32)], settings, Behaviour.parse(protocol="async"), plans, compute)
    simulation.run()

    assert simulation.shards[0].state().parameters.tolist() == [3.0]


def test_sizes_count_in_messages_and_cost_no_memory():
    run = cluster(workers=[WorkerPlan("a", steps=3, codec=INT8)], network=Network(sizes=[10**9])).run()

    assert run.simulation.server.bytes_in == 3 * INT8.max_bytes(10**9)
    assert run.simulation.server.bytes_out == 3 * 4 * 10**9


def test_a_worker_that_fails_comes_back_as_a_new_process_and_others_go_on():
    plans = [WorkerPlan("a", failures=Failures(mean_seconds=5.0, recovery_seconds=3.0)), WorkerPlan("b")]
    run = cluster("hardsync", workers=plans, compute=noisy, server=ServerPlan(lease_seconds=1.0)).run(seconds=200.0)

    died, joined = times(run, Kind.DIE), times(run, Kind.JOIN)
    assert 15 < len(died) < 40
    assert joined == [0.0, *[time + 3.0 for time in died if time + 3.0 <= 200.0]]
    assert run.steps("a") < run.steps("b") < 200
    again = cluster("hardsync", workers=plans, compute=noisy, server=ServerPlan(lease_seconds=1.0)).run(seconds=200.0)
    assert again.simulation.trace() == run.simulation.trace()


@pytest.mark.parametrize("protocol", ["hardsync", "ssp:s=1", "serial", "asgd"])
def test_what_a_life_waited_for_does_not_come_to_the_next(protocol):
    plans = [WorkerPlan(name, failures=Failures(mean_seconds=4.0, recovery_seconds=0.5)) for name in "abcd"]
    network = Network(0.1, bytes_per_second=100.0)
    server = ServerPlan(lease_seconds=2.0, pull_seconds=0.1)
    run = cluster(protocol, parameters=[[0.0], [0.0]], workers=plans, network=network, server=server).run(seconds=200.0)

    assert len(run.events(Kind.DIE)) > 100
    assert run.events(Kind.PUSH)[-1].time > 190.0


def test_a_run_that_ends_under_two_shards_lets_its_workers_leave_once():
    run = cluster(parameters=[[0.0], [0.0]], workers=2)
    run.simulation.at(3.5, run.simulation.server.run.finish)
    run.run()
    assert Counter(event.worker_id for event in run.events(Kind.LEAVE)) == {"a": 1, "b": 1}


def test_no_event_is_kept_unless_asked_for_and_counts_are():
    plans = [WorkerPlan("a", fixed(1.0)), WorkerPlan("b", scripted([2.0]))]
    settings = RuleSettings.make("sgd", ({"learning_rate": 1.0},))
    simulation = Simulation([np.zeros(1, np.float32)], settings, Behaviour.parse(protocol="async"), plans, ones)
    simulation.run(seconds=6.0)

    with pytest.raises(ValueError, match="keep_events=True"):
        simulation.receipts()
    assert simulation.tally.histogram == {0: 4, 1: 2, 2: 3}
    assert [worker.computing_seconds for worker in simulation.workers] == [6.0, 6.0]


@pytest.mark.parametrize(
    "text",
    ["normal", "lognormal:x", "lognormal:-1", "fixed:1", "scripted", "poisson:1", "exponential:2", "normal:6"],
)
def test_times_that_cannot_be_are_refused(text):
    with pytest.raises(InvalidArgument, match=f"the times are '{text}'; expected fixed, normal:VARIATION"):
        parse_timing(text)


def test_times_are_read_from_text():
    random = np.random.default_rng(0)
    assert [parse_timing("scripted:1,3", mean=2.0)(step, random) for step in range(3)] == [2.0, 6.0, 6.0]
    same = np.random.default_rng(0)
    assert parse_timing("lognormal:0.3", mean=2.0)(0, random) == pytest.approx(
        2 * np.exp(0.3 * same.standard_normal() - 0.045)
    )


def test_workers_and_server_that_share_processors_stretch_what_begins_meanwhile():
    run = cluster(workers=3, server=ServerPlan(cores=2)).run(seconds=1.5)
    assert [times(run, Kind.PUSH, name) for name in "abc"] == [[1.0], [1.0], [1.5]]

    run = cluster(workers=2, server=ServerPlan(cores=1, service_seconds=0.5)).run(seconds=3.0)
    # b's step takes from 0 to 2, beside a's; so a's push, there at 1, takes 1 s, and b's too, beside a's next step.
    assert [times(run, Kind.PUSH, name) for name in "ab"] == [[2.0], [3.0]]
