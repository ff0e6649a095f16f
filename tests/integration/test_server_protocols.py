"""Every protocol on a real server with one to four workers: all complete, and updates are what the protocol says."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from inspection import inspect
from pyps_wire import common_pb2 as common
from pyps_wire.partition import Model, Tensor
from support import wait_until
from wire_worker import WireWorker, at_once, crew, refusal_of, status_of, values_of

STEPS = 6
# Two shards.
MODEL = Model((Tensor("x", (2048,)),), shard_size=1024)

PROTOCOLS = [
    "async", "softsync:n=1", "softsync:n=2", "hardsync", "hardsync:weighting=equal", "backup:b=0", "backup:b=1",
    "ssp:s=0", "ssp:s=3", "ssp:s=0,strict_bsp=true", "serial", "asgd", "asgd:mutex=shard",
]  # fmt: skip


def test_updates_are_what_each_protocol_says_they_are(start_server):
    for protocol in PROTOCOLS:
        check_updates(start_server, protocol, num_workers=4)
    for protocol in ("async", "hardsync", "serial"):
        check_updates(start_server, protocol, num_workers=1)


def check_updates(start_server, protocol, *, num_workers):
    """All workers take all their steps, and the updates are of as many gradients as the protocol says."""
    server = start_server("--protocol", protocol, "--staleness", "none", "--expected-workers", str(num_workers))
    with crew(server, num_workers, model=MODEL) as workers:
        receipts = at_once([partial(self_contained, worker) for worker in workers])
        shards = workers[0].observe()
    versions = [shard.version for shard in shards]
    values = [set(map(float, values_of(shard))) for shard in shards]
    taken = [receipt for own in receipts for receipt in own if receipt.outcome != common.OUTCOME_REJECTED]
    pushes = num_workers * STEPS
    if protocol.startswith(("hardsync", "backup:b=0")):
        assert versions == [STEPS, STEPS], protocol
        assert values == [{-STEPS}] * 2, f"{protocol}: each round is the mean of ones"
        assert {receipt.staleness for receipt in taken} == {0}, protocol
    elif protocol.startswith("ssp:s=0,strict_bsp"):
        assert versions == [STEPS, STEPS], protocol
        assert values == [{-pushes}] * 2, f"{protocol}: each round is a sum of ones"
    elif protocol.startswith("backup:b=1"):
        assert len(taken) <= 2 * pushes, protocol
        assert values == [{-version} for version in versions], protocol
    elif protocol.startswith("softsync"):
        splits = int(protocol[-1])
        gradients_per_update = max(1, num_workers // splits)
        # Workers that have gone count no more, so that nobody's last gradients wait for them.
        assert all(pushes // gradients_per_update <= version <= pushes for version in versions), protocol
        assert values == [{-version} for version in versions], protocol
    else:
        assert versions == [pushes, pushes], protocol
        assert values == [{-pushes}] * 2, protocol
    if protocol == "serial":
        assert {receipt.staleness for receipt in taken} == {0}, protocol
    if protocol == "ssp:s=0":
        assert max(receipt.staleness for receipt in taken) <= 2 * (num_workers - 1), protocol


def self_contained(worker: WireWorker, clock: int = 0) -> list[common.Receipt]:
    """A worker's steps up to its end."""
    receipts = worker.train(STEPS, clock=clock)
    worker.leave()
    return receipts


def test_a_late_joiner_takes_its_steps_beside_the_others(start_server):
    # Under backup:b=1 a joiner's gradients may all be the late ones.
    for protocol in (protocol for protocol in PROTOCOLS if protocol != "backup:b=1"):
        server = start_server("--protocol", protocol, "--staleness", "none")
        with (
            crew(server, 1, model=MODEL) as [first],
            WireWorker(server.data, "late", model=MODEL) as late,
            ThreadPoolExecutor(1) as pool,
        ):
            pushed = first.train(2)
            late.hello()
            others = pool.submit(self_contained, late)
            if protocol != "serial":
                # From its first push on no round is made without it; of turns, each waits for the other's.
                wait_until(lambda server=server: pushed_of(server, "late") == 2, 60, f"{protocol}: the joiner's push")
            pushed += self_contained(first, clock=2)
            own = others.result(60)
            shards = inspect(server.control, "ListShards").shards
        taken = [receipt for receipt in pushed + own if receipt.outcome != common.OUTCOME_REJECTED]
        assert sum(shard.pushes_applied + shard.pushes_pending for shard in shards) == len(taken), protocol
        assert max(receipt.num_workers for receipt in own) == 2, protocol
        # Backup alone may go on without a gradient that is late.
        lost = STEPS if protocol.startswith("backup") else 0
        assert len(pushed) == 2 * (2 + STEPS) and len(own) == 2 * STEPS, protocol
        assert len(taken) >= len(pushed) + len(own) - lost, protocol


def pushed_of(server, worker_id: str) -> int:
    """How many shards the worker has pushed to."""
    workers = inspect(server.control, "ListWorkers").workers
    return next(len(worker.shards_pushed) for worker in workers if worker.worker_id == worker_id)


@pytest.mark.parametrize("stage", ["serial", "hardsync"])
def test_a_warm_up_gives_way_to_the_main_protocol_and_keeps_the_slots(start_server, stage):
    server = start_server(
        *("--protocol", "async", "--staleness", "none", "--warmup", f"updates=4,protocol={stage}"),
        *("--expected-workers", "2", "--optimizer", "momentum:learning_rate=1,momentum=0.5"),
    )
    with crew(server, 2, model=MODEL, optimizer=common.OptimizerSettings()) as workers:
        receipts = at_once([partial(worker.train, STEPS) for worker in workers])
        late = workers[0].train(1, clock=STEPS)
    early = [receipt for own in receipts for receipt in own if receipt.version_before < 4]
    assert {receipt.staleness for receipt in early} == {0}
    assert not late[-1].ask_to_proceed
    status = status_of(server)
    assert not status.warming_up
    assert status.version_max == (2 * STEPS if stage == "serial" else 2 * STEPS - 4) + 1


def test_staggered_release_lets_one_worker_after_the_other_in(start_server):
    server = start_server(
        *("--staleness", "none", "--warmup", "updates=2,protocol=serial,release_every=5", "--expected-workers", "2")
    )
    with crew(server, 2) as [first, second]:
        turn = first.stub.Proceed.future(first.proceed_request(0), timeout=40)
        [wait] = wait_until(lambda: status_of(server).waiting_for, 20, "the first worker's question")
        assert wait == "w0 waits to begin step 1, for w1"
        second_turn = second.stub.Proceed.future(second.proceed_request(0), timeout=40)
        turn.result()
        first.push(first.push_request(1.0))
        turn = first.stub.Proceed.future(first.proceed_request(1), timeout=40)
        second_turn.result()
        second.push(second.push_request(1.0, base_version=1))
        turn.result()
        assert refusal_of(second.proceed, 1, wait_seconds=0.3)[1] == "WaitTimedOut"
        for version in range(2, 7):
            first.push(first.push_request(1.0, base_version=version))
        second.proceed(1)


def test_the_minibatch_grows_with_the_examples_behind_the_updates(start_server):
    server = start_server("--batch-growth", "start=8,maximum=32,every=1", "--epoch-examples", "100")
    with crew(server, 1) as [worker]:
        assert worker.hello().batch_size == 8
        sizes = [
            worker.push(worker.push_request(1.0, base_version=version, example_count=60))[0].batch_size
            for version in range(6)
        ]
        assert sizes == [8, 16, 16, 32, 32, 32]


def test_the_server_clips_a_push_by_its_whole_norm(start_server):
    server = start_server("--clip-norm", "2", "--staleness", "none")
    with crew(server, 1) as [worker]:
        assert worker.hello().clip_norm == 2.0
        [receipt] = worker.push(worker.push_request(1.0, gradient_norm=8.0))
        assert receipt.weight == 0.25
        assert set(values_of(worker.pull()[0])) == {-0.25}


def test_asgd_under_one_mutex_refuses_a_second_server_by_name(start_server):
    server = start_server("--protocol", "asgd:mutex=whole")
    with WireWorker(server.data, num_servers=2, server_index=1, model=MODEL) as worker:
        for call in (worker.hello, partial(worker.initialize, 1)):
            status, name, text = refusal_of(call)
            assert (status, name) == ("INVALID_ARGUMENT", "BadRequest")
            for word in ("asgd", "mutex", "2", "one server", "mutex=shard"):
                assert word in text


def test_under_one_mutex_every_pull_sees_all_shards_at_one_push(start_server):
    """Zhang et al. 2013: GET and PUSH exclude each other over the whole model (algorithm notes 2.2, A1 and A2)."""
    server = start_server("--protocol", "asgd:mutex=whole", "--staleness", "none")
    with crew(server, 3, model=MODEL) as [reader, *writers]:
        assert reader.hello().accumulate == 0

        def read() -> None:
            for _ in range(60):
                shards = reader.pull()
                assert len({shard.version for shard in shards}) == 1
                assert len({value for shard in shards for value in values_of(shard)}) == 1

        at_once([read, *(partial(writer.train, 20) for writer in writers)])
        assert status_of(server).version_max == 40


def test_a_push_that_ends_before_it_is_whole_changes_nothing(start_server):
    server = start_server("--protocol", "asgd:mutex=whole")
    with crew(server, 1, model=MODEL) as [worker]:
        half, other = (worker.push_request(1.0, shard_id, sequence=7, num_shards=2) for shard_id in (0, 1))
        status, name, text = refusal_of(worker.push, half)
        assert (status, name) == ("INVALID_ARGUMENT", "BadRequest")
        assert "push 7 of worker 'w0' ended after 1 of its 2 messages, and nothing of it was applied" in text
        assert refusal_of(worker.push, half, worker.push_request(1.0, sequence=8, num_shards=2))[1] == "BadRequest"
        assert {shard.version for shard in worker.pull()} == {0}
        assert [receipt.version_after for receipt in worker.push(half, other)] == [1, 1]
        # After a loss, a client sends those without a receipt again, and says how many they are.
        other.num_shards = 1
        [again] = worker.push(other)
        assert (again.duplicate, again.version_after) == (True, 1)


def test_a_push_that_says_no_number_of_shards_is_whole_when_its_stream_ends(start_server):
    server = start_server("--protocol", "asgd:mutex=whole", "--staleness", "none")
    with crew(server, 1, model=MODEL) as [worker]:
        first, second = worker.push_request(1.0, 0), worker.push_request(1.0, 1)
        second.sequence = first.sequence
        assert [receipt.shard_id for receipt in worker.push(first, second)] == [0, 1]
        replies = list(worker.stub.Exchange(iter([worker.push_request(1.0, 0, 1)]), timeout=20))
        assert [(reply.receipt.shard_id, reply.version) for reply in replies] == [(0, 2)]


def test_a_push_of_parts_that_cannot_become_one_is_refused(start_server):
    """Its memory would be held for what never comes."""
    server = start_server("--protocol", "asgd:mutex=whole")
    with WireWorker(server.data, model=Model((Tensor("t", (32,)),), shard_size=16)) as worker:
        worker.join()
        parts = [worker.push_request(1.0, 0) for _ in range(2)]
        for num_shards, text in ((3, "num_shards 3, and this server holds 2"), (2, "holds shard 0 twice")):
            for part in parts:
                part.num_shards, part.sequence = num_shards, 7
            status, name, message = refusal_of(worker.push, *parts)
            assert (status, name) == ("INVALID_ARGUMENT", "BadRequest")
            assert text in message
