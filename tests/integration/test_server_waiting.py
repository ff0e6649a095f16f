"""Waiting and load on a real server: no wait costs a thread, and nobody waits for somebody who does not read."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from inspection import inspect
from pyps_wire import common_pb2 as common
from pyps_wire import inspector_pb2
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.contract import METHODS
from pyps_wire.errors import METADATA_KEY
from pyps_wire.inspector_pb2_grpc import InspectorStub
from pyps_wire.partition import Model, Tensor
from support import wait_until
from wire_worker import CHANNEL_OPTIONS, WireWorker, refusal_of

# Four shards of a megabyte each.
LARGE = Model((Tensor("x", (1_048_576,)),), shard_size=262_144)


def status_of(server) -> inspector_pb2.Status:
    """What the control plane says."""
    with grpc.insecure_channel(server.control, options=CHANNEL_OPTIONS) as channel:
        return InspectorStub(channel).GetStatus(inspector_pb2.GetStatusRequest(), timeout=20)


def waiting_pull(worker: WireWorker, min_version: int, seconds: float = 40.0):
    """Starts a pull of shard 0 that waits for a version."""
    want = wire.PullRequest.Want(shard_id=0, held_version=min_version - 1, min_version=min_version)
    request = wire.PullRequest(
        sender=worker.sender, epoch=worker.epoch, wants=[want], wait_milliseconds=round(seconds * 1000)
    )
    return worker.stub.Pull(request, timeout=seconds + 10)


def test_64_parked_pulls_hold_no_thread_and_are_answered_when_the_version_arrives(start_server_process):
    server = start_server_process()
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(WireWorker(server.data, f"w{index}")) for index in range(64)]
        for worker in workers:
            worker.join()
        threads_before = psutil.Process(server.pid).num_threads()
        pulls = [waiting_pull(worker, 1) for worker in workers]
        waits = wait_until(lambda: (w := status_of(server).waiting_for) and len(w) == 64 and w, 20, "64 waits")
        assert any("w63 waits for version 1 of shard 0, which is at 0" in wait for wait in waits)
        # gRPC keeps a few threads of its own; 64 parked calls must not add one each.
        assert psutil.Process(server.pid).num_threads() < threads_before + 16
        workers[0].push(workers[0].push_request(1.0))
        for pull in pulls:
            assert [shard.version for shard in pull] == [1]
        assert list(status_of(server).waiting_for) == []


def test_64_workers_push_and_pull_at_once_and_all_complete(start_server_process):
    server = start_server_process()
    rounds, num_workers = 5, 64
    barrier = threading.Barrier(num_workers)

    def work(index: int) -> int:
        with WireWorker(server.data, f"w{index}") as worker:
            worker.join()
            wait_until(lambda: worker.hello().state == common.RUN_STATE_READY, 60, "the first parameters")
            barrier.wait(60)
            version = 0
            for _ in range(rounds):
                [receipt] = worker.push(worker.push_request(1.0, base_version=version))
                want = wire.PullRequest.Want(shard_id=0, held_version=version, min_version=receipt.version_after)
                version = worker.pull([want], wait_seconds=20)[0].version
                barrier.wait(60)
            return version

    with ThreadPoolExecutor(num_workers) as pool:
        versions = list(pool.map(work, range(num_workers)))
    assert max(versions) == rounds * num_workers
    assert status_of(server).version_max == rounds * num_workers


def test_a_wait_that_ends_says_what_it_waited_for(start_server_process):
    server = start_server_process()
    with WireWorker(server.data, "patient") as worker:
        worker.join()
        want = wire.PullRequest.Want(shard_id=0, held_version=0, min_version=3)
        with pytest.raises(grpc.RpcError) as caught:
            worker.pull([want], wait_seconds=0.3)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert dict(caught.value.trailing_metadata())[METADATA_KEY] == "WaitTimedOut"
        for word in ("0.3 s", "patient waits for version 3 of shard 0", "at 0", "live workers: patient"):
            assert word in caught.value.details()


def test_shards_that_are_ready_do_not_wait_for_those_that_are_not(start_server_process):
    server = start_server_process()
    with WireWorker(server.data, model=LARGE) as worker:
        worker.join()
        wants = [wire.PullRequest.Want(shard_id=i, held_version=-1, min_version=int(i == 0)) for i in range(4)]
        request = wire.PullRequest(sender=worker.sender, wants=wants, wait_milliseconds=30_000)
        pull = worker.stub.Pull(request, timeout=40)
        assert sorted(next(pull).shard_id for _ in range(3)) == [1, 2, 3]
        worker.push(worker.push_request(1.0, 0))
        last = next(pull)
        assert (last.shard_id, last.version) == (0, 1)


def test_a_cancelled_or_vanished_waiter_leaves_nothing_behind(start_server_process):
    server = start_server_process()
    with WireWorker(server.data, "a") as stays, WireWorker(server.data, "b") as goes:
        stays.join()
        goes.join()
        cancelled, _ = waiting_pull(stays, 1), waiting_pull(goes, 1)
        wait_until(lambda: len(status_of(server).waiting_for) == 2, 20, "both waits")
        cancelled.cancel()
        goes.channel.close()
        wait_until(lambda: not status_of(server).waiting_for, 20, "the end of both waits")
        assert stays.push(stays.push_request(1.0))[0].outcome == common.OUTCOME_APPLIED
        assert "Traceback" not in server.output()


@contextlib.contextmanager
def deaf_worker(server, worker_id: str):
    """A worker that pushes and pulls without ever reading a reply."""
    with WireWorker(server.data, worker_id, model=LARGE) as worker:
        worker.join()
        messages = (worker.push_request(0.0, index % 4).SerializeToString() for index in range(64))
        exchange = worker.channel.stream_stream(METHODS["Exchange"])(messages, timeout=100)
        request = wire.PullRequest(sender=worker.sender).SerializeToString()
        pulls = [worker.channel.unary_stream(METHODS["Pull"])(request, timeout=100) for _ in range(8)]
        try:
            yield worker
        finally:
            for call in (exchange, *pulls):
                call.cancel()


def test_a_worker_that_never_reads_its_replies_disturbs_nobody(start_server_process):
    server = start_server_process("--optimizer", "sgd:learning_rate=1")
    with contextlib.ExitStack() as stack:
        for index in range(4):
            stack.enter_context(deaf_worker(server, f"deaf{index}"))
        # Their first push shows that they are at it.
        wait_until(lambda: status_of(server).pushes_applied >= 1, 20, "a push of a deaf worker")
        with WireWorker(server.data, "lively", model=LARGE) as lively:
            lively.join()
            began = time.monotonic()
            for _ in range(10):
                assert len(lively.push(*[lively.push_request(0.0, shard) for shard in range(4)])) == 4
                assert len(lively.pull()) == 4
            assert time.monotonic() - began < 20
        memory = psutil.Process(server.pid).memory_info().rss
        assert memory < 600 * 2**20


def test_the_control_plane_answers_while_the_data_plane_is_saturated(start_server_process):
    server = start_server_process("--optimizer", "sgd:learning_rate=1")
    ends = threading.Event()

    def saturate(index: int) -> int:
        pushes = 0
        with WireWorker(server.data, f"w{index}", model=LARGE) as worker:
            worker.join()
            wait_until(lambda: worker.hello().state == common.RUN_STATE_READY, 20, "the run")
            frames = [worker.push_request(0.0, shard) for shard in range(4)]
            call = worker.channel.stream_stream(METHODS["Push"])

            def messages():
                sequence = 0
                while not ends.is_set():
                    sequence += 1
                    for frame in frames:
                        frame.sequence = sequence
                        yield frame.SerializeToString()

            for _ in call(messages(), timeout=60):
                pushes += 1
        return pushes

    with ThreadPoolExecutor(4) as pool:
        saturators = [pool.submit(saturate, index) for index in range(4)]
        wait_until(lambda: status_of(server).pushes_applied > 20, 30, "the load")
        seconds = []
        with grpc.insecure_channel(server.control, options=CHANNEL_OPTIONS) as channel:
            health, inspector = health_pb2_grpc.HealthStub(channel), InspectorStub(channel)
            for _ in range(20):
                began = time.monotonic()
                reply = health.Check(health_pb2.HealthCheckRequest(), timeout=20)
                inspector.GetStatus(inspector_pb2.GetStatusRequest(), timeout=20)
                seconds.append(time.monotonic() - began)
                assert reply.status == health_pb2.HealthCheckResponse.SERVING
        ends.set()
        assert all(saturator.result(60) > 0 for saturator in saturators)
    assert statistics.median(seconds) < 3.0


def test_a_pull_parked_when_the_run_is_reset_is_told_so(start_server_process):
    server = start_server_process("--run-id", "run-1", "--protocol", "hardsync", "--expected-workers", "2")
    with WireWorker(server.data) as worker:
        worker.join()
        worker.push(worker.push_request(1.0))
        want = wire.PullRequest.Want(shard_id=0, held_version=-1, min_version=1)
        with ThreadPoolExecutor(1) as pool:
            parked = pool.submit(refusal_of, worker.pull, [want], wait_seconds=30)
            wait_until(lambda: status_of(server).waiting_for, 20, "the wait")
            inspect(server.control, "Reset", inspector_pb2.ResetRequest(run_id="run-1"))
            _, name, text = parked.result(20)
        assert (name, text) == ("NotInitialized", "the run was reset while the pull waited")


def test_two_workers_in_opposite_shard_order_do_not_deadlock(start_server_process):
    """One exchanges first layers first while the other sends last layers first."""
    server = start_server_process("--optimizer", "sgd:learning_rate=1")
    orders = [range(4), range(3, -1, -1)]

    def exchange(index: int) -> int:
        with WireWorker(server.data, f"w{index}", model=LARGE) as worker:
            worker.join()
            wait_until(lambda: worker.hello().state == common.RUN_STATE_READY, 20, "the run")
            requests = [worker.push_request(0.0, shard) for _ in range(5) for shard in orders[index]]
            replies = list(worker.stub.Exchange(iter(requests), timeout=40))
            assert all(len(np.frombuffer(reply.payload, np.float32)) == 262_144 for reply in replies)
            return len(replies)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(exchange, range(2))) == [20, 20]
