"""Barriers on a real server: who is waited for, for how long, and what happens to those who are not."""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import psutil

from client_support import Clock
from pyps_wire import common_pb2 as common
from pyps_wire.partition import Model, Tensor
from support import inspect, status_of, wait_for_event, wait_until
from wire_worker import HARDSYNC, QUICK_LEASES, WireWorker, at_once, crew, parked_pull, values_of


def test_the_gradient_that_completes_a_round_needs_no_room(start_server):
    server = start_server(*HARDSYNC, "--expected-workers", "8", "--max-pending-bytes", str(7 * 4 * 37))
    with crew(server, 8) as workers:
        receipts = [worker.push(worker.push_request(1.0))[0] for worker in workers]
        assert [receipt.outcome for receipt in receipts] == [common.OUTCOME_PENDING] * 7 + [common.OUTCOME_APPLIED]


def test_a_round_with_a_quorum_is_made_when_its_grace_ends(start_server):
    server = start_server("--protocol", "backup:b=1,grace=0.3", "--expected-workers", "3")
    with crew(server, 3) as [first, second, late]:
        at_once([partial(worker.train, 1) for worker in (first, second, late)])
        began = time.monotonic()
        first.push(first.push_request(1.0, base_version=1))
        second.push(second.push_request(1.0, base_version=1))
        [shard] = parked_pull(first, 2)
        assert (shard.version, 0.3 <= time.monotonic() - began < 5) == (2, True)


def test_a_restored_run_waits_one_lease_at_most_for_its_former_workers(start_server, tmp_path):
    flags = (*HARDSYNC, *QUICK_LEASES, "--checkpoint-dir", str(tmp_path), "--expected-workers", "2")
    server = start_server(*flags)
    with crew(server, 2) as workers:
        at_once([partial(worker.train, 2) for worker in workers])
    server.stop()
    clock = Clock()
    server = start_server(*flags, "--resume", clock=clock)
    with WireWorker(server.data, "w0") as alone:
        clock.during(partial(alone.train, 3, wait_seconds=60), server)
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


def test_64_hardsync_workers_complete_on_the_default_server_and_hold_no_thread_while_parked(start_server_process):
    server = start_server_process(*HARDSYNC, "--expected-workers", "64")
    with crew(server, 64) as [*early, last]:
        before = psutil.Process(server.pid).num_threads()
        for index, worker in enumerate(early):
            assert worker.push(worker.push_request(float(index)))[0].outcome == common.OUTCOME_PENDING
        pulls = [parked_pull(worker, 1) for worker in early]
        wait_until(lambda: len(status_of(server).waiting_for) == 63, 60, "all waits")
        assert psutil.Process(server.pid).num_threads() < before + 16
        last.push(last.push_request(63.0))
        mean = sum(range(64)) / 64
        assert [[(shard.version, set(values_of(shard))) for shard in pull] for pull in pulls] == [[(1, {-mean})]] * 63
        rounds = at_once([partial(worker.train, 3, clock=1, wait_seconds=60) for worker in (*early, last)], 100)
        assert {receipt.staleness for own in rounds for receipt in own} == {0}
        assert status_of(server).version_max == 4


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


STEPS = 6
TWO_SHARDS = Model((Tensor("x", (2048,)),), shard_size=1024)
# Under backup a joiner's gradients may be the late ones.
LATE_JOINED = (
    *("async", "softsync:n=1", "softsync:n=2", "hardsync", "hardsync:weighting=equal"),
    *("ssp:s=0", "ssp:s=3", "ssp:s=0,strict_bsp=true", "serial", "asgd", "asgd:mutex=shard"),
)


def test_a_late_joiner_takes_its_steps_together_with_the_others(start_server):
    for protocol in LATE_JOINED:
        server = start_server("--protocol", protocol, "--staleness", "none")
        with (
            crew(server, 1, model=TWO_SHARDS) as [first],
            WireWorker(server.data, "late", model=TWO_SHARDS) as late,
            ThreadPoolExecutor(1) as pool,
        ):
            pushed = first.train(2)
            late.hello()
            others = pool.submit(train_and_leave, late)
            if protocol != "serial":
                # From its first push on no round is made without it; of turns, each waits for the other's.
                wait_until(lambda server=server: pushed_of(server, "late") == 2, 60, f"{protocol}: the joiner's push")
            pushed += train_and_leave(first, clock=2)
            own = others.result(60)
            shards = inspect(server.control, "ListShards").shards
        taken = [receipt for receipt in pushed + own if receipt.outcome != common.OUTCOME_REJECTED]
        assert sum(shard.tally.pushes_applied + shard.tally.pushes_pending for shard in shards) == len(taken), protocol
        assert max(receipt.num_workers for receipt in own) == 2, protocol
        assert (len(pushed), len(own), len(taken)) == (2 * (2 + STEPS), 2 * STEPS, 2 * (2 + 2 * STEPS)), protocol


def pushed_of(server, worker_id: str) -> int:
    workers = inspect(server.control, "ListWorkers").workers
    return next(len(worker.shards_pushed) for worker in workers if worker.worker_id == worker_id)


def train_and_leave(worker: WireWorker, clock: int = 0) -> list[common.Receipt]:
    receipts = worker.train(STEPS, clock=clock)
    worker.leave()
    return receipts
