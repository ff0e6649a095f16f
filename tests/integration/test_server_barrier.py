"""Barriers on a real server: who is waited for, for how long, and what happens to those who are not."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import grpc.aio
import numpy as np
import psutil

from pyps_wire import common_pb2 as common
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.parameter_server_pb2_grpc import ParameterServerStub
from pyps_wire.partition import Model, Tensor
from support import wait_until
from wire_worker import (
    CHANNEL_OPTIONS,
    QUICK_LEASES,
    WireWorker,
    at_once,
    beating,
    crew,
    events_of,
    parked_pull,
    refusal_of,
    status_of,
    values_of,
    wait_for_event,
)

HARDSYNC = ("--protocol", "hardsync", "--staleness", "none")


def test_a_worker_that_dies_inside_a_round_holds_the_others_up_for_its_lease_at_most(start_server):
    server = start_server(*HARDSYNC, *QUICK_LEASES, "--expected-workers", "3")
    with crew(server, 2) as workers, beating(workers):
        with WireWorker(server.data, "doomed") as doomed:
            doomed.join()
            first_rounds = at_once([partial(worker.train, 2) for worker in (*workers, doomed)])
        assert {receipt.num_workers for own in first_rounds for receipt in own} >= {3}
        assert status_of(server).version_max == 2
        # In the third round the two wait for a worker that does not come.
        at_once([partial(worker.train, 3, clock=2, wait_seconds=60) for worker in workers], 100)
    assert status_of(server).version_max == 5
    [expired] = events_of(server, "expired")
    assert expired.startswith("worker's lease ran out: worker doomed")
    [message] = events_of(server, "round")
    assert message.startswith("rounds were completed without a worker that others waited for: worker doomed")


def test_a_receipt_and_a_wait_name_those_waited_for(start_server):
    server = start_server(*HARDSYNC)
    with crew(server, 3) as [first, second, third]:
        # A worker counts from its first push: the first round is made by the first.
        first.push(first.push_request(0.0))
        for worker in (second, third):
            assert worker.push(worker.push_request(0.0))[0].reason == common.REASON_STALE
        [receipt] = first.push(first.push_request(1.0, base_version=1))
        assert (receipt.outcome, receipt.min_version) == (common.OUTCOME_PENDING, 2)
        assert list(receipt.waiting_for) == ["w1", "w2"]
        call = parked_pull(first, 2)
        [wait] = wait_until(lambda: status_of(server).waiting_for, 20, "the wait")
        assert wait == "w0 waits for version 2 of shard 0, which is at 1; its round waits for w1, w2"
        want = wire.PullRequest.Want(shard_id=0, held_version=1, min_version=2)
        text = refusal_of(first.pull, [want], wait_seconds=0.2)[2]
        assert "its round waits for w1, w2" in text
        second.push(second.push_request(2.0, base_version=1))
        [repeated] = second.push(second.push_request(2.0, base_version=1))
        assert (repeated.reason, repeated.min_version) == (common.REASON_REPEATED, 2)
        [last] = third.push(third.push_request(3.0, base_version=1))
        assert (last.outcome, last.version_after) == (common.OUTCOME_APPLIED, 2)
        [shard] = call
        assert set(values_of(shard)) == {-2.0}


def test_nobody_waits_for_a_worker_that_has_finished(start_server):
    """Unequal data: one worker has 3 steps, another 9."""
    server = start_server(*HARDSYNC, "--expected-workers", "2")
    with crew(server, 2) as [short, long]:

        def finish() -> None:
            short.train(3)
            short.leave()

        at_once([finish, partial(long.train, 9)])
    assert status_of(server).version_max == 9
    assert "worker w0" in wait_for_event(server, "left")


def test_a_worker_that_lives_but_stalls_stops_counting_until_its_next_push(start_server):
    server = start_server(*HARDSYNC, "--stall-seconds", "2", "--expected-workers", "2")
    with crew(server, 2) as [busy, stalls]:
        at_once([partial(worker.train, 1) for worker in (busy, stalls)])
        busy.train(3, clock=1)
        assert status_of(server).version_max == 4
        assert "worker w1" in wait_for_event(server, "stalled")
        assert list(status_of(server).roster) == ["w0"]
        assert stalls.push(stalls.push_request(1.0, base_version=1))[0].reason == common.REASON_STALE
        assert list(status_of(server).roster) == ["w0", "w1"]
        at_once([partial(worker.train, 2) for worker in (busy, stalls)])
    assert status_of(server).version_max == 6


def test_the_first_update_waits_for_the_expected_workers(start_server):
    server = start_server(*HARDSYNC, "--expected-workers", "3")
    with crew(server, 2) as [first, second]:
        for worker in (first, second):
            [receipt] = worker.push(worker.push_request(1.0))
            assert receipt.outcome == common.OUTCOME_PENDING
        call = parked_pull(first, 1)
        [wait] = wait_until(lambda: status_of(server).waiting_for, 20, "the wait")
        assert wait.endswith("its round waits for 1 more worker that has not joined")
        with WireWorker(server.data, "w2") as third:
            third.hello()
            assert third.push(third.push_request(4.0))[0].outcome == common.OUTCOME_APPLIED
            [shard] = call
            assert set(values_of(shard)) == {-2.0}


def test_an_expected_worker_that_goes_before_its_first_push_is_waited_for_no_longer(start_server):
    server = start_server(*HARDSYNC, "--expected-workers", "2")
    with crew(server, 2) as [stays, goes]:
        assert stays.push(stays.push_request(1.0))[0].outcome == common.OUTCOME_PENDING
        call = parked_pull(stays, 1)
        goes.leave()
        assert [shard.version for shard in call] == [1]


def test_backup_workers_late_gradients_are_dropped_and_counted(start_server):
    """Chen et al. 2016: the first L - b gradients of a version make the update (algorithm notes 2.11)."""
    server = start_server("--protocol", "backup:b=1", "--staleness", "none", "--expected-workers", "3")
    with crew(server, 3) as [first, second, late]:
        # The first update waits for all who are expected.
        for worker, outcome in ((late, "PENDING"), (first, "PENDING"), (second, "APPLIED")):
            assert worker.push(worker.push_request(1.0))[0].outcome == common.Outcome.Value(f"OUTCOME_{outcome}")
        assert first.push(first.push_request(1.0, base_version=1))[0].outcome == common.OUTCOME_PENDING
        assert second.push(second.push_request(3.0, base_version=1))[0].outcome == common.OUTCOME_APPLIED
        [receipt] = late.push(late.push_request(100.0, base_version=1))
        assert (receipt.reason, receipt.min_version) == (common.REASON_DROPPED, 2)
        [shard] = late.pull()
        assert set(values_of(shard)) == {-3.0}
    assert status_of(server).pushes_dropped == 1


def test_a_push_of_nothing_counts_in_a_round(start_server):
    server = start_server(*HARDSYNC, "--expected-workers", "2")
    nothing = {"kind": common.PAYLOAD_KIND_NOTHING, "payload": b"", "example_count": 0}
    with crew(server, 2) as [first, second]:
        assert first.push(first.push_request(0.0, **nothing))[0].outcome == common.OUTCOME_PENDING
        assert second.push(second.push_request(2.0))[0].version_after == 1
        assert set(values_of(first.pull()[0])) == {-2.0}
        first.push(first.push_request(0.0, base_version=1, **nothing))
        [receipt] = second.push(second.push_request(0.0, base_version=1, **nothing))
        assert (receipt.outcome, receipt.version_after) == (common.OUTCOME_APPLIED, 2)
        assert set(values_of(first.pull()[0])) == {-2.0}


def test_gradients_that_wait_beyond_the_budget_are_refused_by_the_setting_s_name(start_server):
    payload_bytes = 4 * 37
    server = start_server(
        *HARDSYNC, "--expected-workers", "9", "--max-pending-bytes", str(max(2**10, 7 * payload_bytes))
    )
    with crew(server, 9) as workers:
        for worker in workers[:7]:
            assert worker.push(worker.push_request(1.0))[0].outcome == common.OUTCOME_PENDING
        status, name, text = refusal_of(workers[7].push, workers[7].push_request(1.0))
        assert (status, name) == ("RESOURCE_EXHAUSTED", "LimitExceeded")
        for word in (f"{payload_bytes} bytes more", str(7 * payload_bytes), "--max-pending-bytes"):
            assert word in text
        assert status_of(server).pending_gradients == 7
        # What they took is free again once they are an update.
        workers[8].leave()
        workers[7].leave()
        wait_until(lambda: status_of(server).version_max == 1, 20, "the round of the seven")
        assert workers[0].push(workers[0].push_request(1.0, base_version=1))[0].outcome == common.OUTCOME_PENDING


def test_the_gradient_that_completes_a_round_needs_no_room(start_server):
    server = start_server(*HARDSYNC, "--expected-workers", "8", "--max-pending-bytes", str(7 * 4 * 37))
    with crew(server, 8) as workers:
        receipts = [worker.push(worker.push_request(1.0))[0] for worker in workers]
        assert [receipt.outcome for receipt in receipts] == [common.OUTCOME_PENDING] * 7 + [common.OUTCOME_APPLIED]


def test_a_restart_amid_a_round_goes_on_with_what_had_come(start_server, tmp_path):
    flags = (*HARDSYNC, "--checkpoint-dir", str(tmp_path), "--expected-workers", "3")
    server = start_server(*flags)
    with crew(server, 3) as [first, second, _]:
        sent = [worker.push_request(float(value)) for worker, value in ((first, 1), (second, 3))]
        for worker, request in zip((first, second), sent, strict=True):
            assert worker.push(request)[0].outcome == common.OUTCOME_PENDING
        assert server.stop() == 0
    server = start_server(*flags, "--resume")
    with (
        WireWorker(server.data, "w0") as first,
        WireWorker(server.data, "w1") as second,
        WireWorker(server.data, "w2") as third,
    ):
        first.sender.incarnation = sent[0].sender.incarnation
        for worker in (first, second, third):
            assert worker.hello().epoch == 1
        # Sent again it gets its first answer; computed again it is one too many.
        [again] = first.push(sent[0])
        assert (again.duplicate, again.outcome, again.min_version) == (True, common.OUTCOME_PENDING, 1)
        assert second.push(second.push_request(9.0))[0].reason == common.REASON_REPEATED
        assert status_of(server).version_max == 0
        [receipt] = third.push(third.push_request(5.0))
        assert (receipt.outcome, receipt.version_after) == (common.OUTCOME_APPLIED, 1)
        assert set(values_of(first.pull()[0])) == {-3.0}


def test_a_restored_run_waits_one_lease_at_most_for_its_former_workers(start_server, tmp_path):
    flags = (*HARDSYNC, *QUICK_LEASES, "--checkpoint-dir", str(tmp_path), "--expected-workers", "2")
    server = start_server(*flags)
    with crew(server, 2) as workers:
        at_once([partial(worker.train, 2) for worker in workers])
    server.stop()
    server = start_server(*flags, "--resume")
    with WireWorker(server.data, "w0") as alone:
        alone.train(3, wait_seconds=60)
    assert status_of(server).version_max == 5


def test_gradients_that_waited_under_another_protocol_are_settled_at_a_restart(start_server, tmp_path):
    server = start_server(*HARDSYNC, "--checkpoint-dir", str(tmp_path), "--expected-workers", "3")
    with crew(server, 3) as [first, second, _]:
        first.push(first.push_request(1.0))
        second.push(second.push_request(3.0))
        server.stop()
    server = start_server("--protocol", "async", "--checkpoint-dir", str(tmp_path), "--resume")
    with WireWorker(server.data, "w0") as worker:
        worker.hello()
        [shard] = worker.pull()
        assert (shard.version, set(values_of(shard))) == (1, {-2.0})
    assert "protocol async" in wait_for_event(server, "configured")


def test_64_hardsync_workers_complete_on_the_default_server(start_server_process):
    server = start_server_process(*HARDSYNC, "--expected-workers", "64")
    rounds = 8

    async def work(index: int, plan_worker: WireWorker) -> list[int]:
        async with grpc.aio.insecure_channel(server.data, options=CHANNEL_OPTIONS) as channel:
            stub = ParameterServerStub(channel)
            hello = wire.HelloRequest(
                sender=plan_worker.sender, protocol_version=1, role=common.ROLE_WORKER, num_servers=1,
                model=plan_worker.model.to_proto(), optimizer=plan_worker.optimizer,
            )  # fmt: skip
            await stub.Hello(hello)
            version, seen = 0, []
            for _ in range(rounds):
                push = plan_worker.push_request(float(index), base_version=version)
                [receipt] = [receipt async for receipt in stub.Push(iter([push]))]
                want = wire.PullRequest.Want(shard_id=0, held_version=version, min_version=version + 1)
                pull = wire.PullRequest(sender=plan_worker.sender, wants=[want], wait_milliseconds=60_000)
                [shard] = [shard async for shard in stub.Pull(pull)]
                assert receipt.staleness == 0
                version = shard.version
                seen.append(version)
            return seen

    async def all_work(workers: list[WireWorker]) -> list[list[int]]:
        return await asyncio.gather(*(work(index, worker) for index, worker in enumerate(workers)))

    with crew(server, 64) as workers:
        threads = [psutil.Process(server.pid).num_threads()]
        ends = threading.Event()

        def watch() -> None:
            while not ends.wait(0.05):
                threads.append(psutil.Process(server.pid).num_threads())

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            seen = asyncio.run(all_work(workers))
        finally:
            ends.set()
            watcher.join(20)
        assert seen == [list(range(1, rounds + 1))] * 64
        assert max(threads) < threads[0] + 16, "a parked call holds no thread"
        mean = np.mean(range(64))
        np.testing.assert_allclose(values_of(workers[0].observe()[0]), -rounds * mean, rtol=1e-6)


def test_rounds_of_large_shards_are_made_on_threads_and_leave_no_waits_behind(start_server):
    large = Model((Tensor("x", (1_048_576,)),), shard_size=524_288)
    server = start_server(*HARDSYNC, "--expected-workers", "4")
    with crew(server, 4, model=large) as workers:
        at_once([partial(worker.train, 3) for worker in workers])
        abandoned = parked_pull(workers[0], 99)
        wait_until(lambda: status_of(server).waiting_for, 20, "the wait")
        abandoned.cancel()
        wait_until(lambda: not status_of(server).waiting_for, 20, "the end of the wait")
        shards = workers[0].observe()
    assert [(shard.version, set(values_of(shard))) for shard in shards] == [(3, {-3.0})] * 4
    assert status_of(server).pending_bytes == 0
