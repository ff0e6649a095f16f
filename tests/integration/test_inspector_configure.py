"""A run that is changed while it goes on, and looked at while its workers wait for each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import grpc
import pytest

from inspection import inspect
from pyps.update_log import log_paths, replay
from pyps_wire import common_pb2 as common
from pyps_wire import inspector_pb2 as pb
from pyps_wire import parameter_server_pb2 as wire
from support import AnyServer, wait_until
from wire_worker import WireWorker

Start = Callable[..., AnyServer]


def configure(server: AnyServer, **changes: Any) -> pb.ConfigureReply:
    return inspect(server.control, "Configure", pb.ConfigureRequest(**changes))


def events(server: AnyServer, **wanted: int) -> pb.ListEventsReply:
    return inspect(server.control, "ListEvents", pb.ListEventsRequest(**wanted))


def status(server: AnyServer) -> pb.Status:
    return inspect(server.control, "GetStatus")


def worker_infos(server: AnyServer) -> dict[str, pb.WorkerInfo]:
    return {worker.worker_id: worker for worker in inspect(server.control, "ListWorkers").workers}


def test_a_change_is_in_force_at_once_and_everybody_can_see_it(start_server: Start) -> None:
    server = start_server("--staleness", "divide")
    with WireWorker(server.data) as worker:
        worker.join()
        before = worker.push(worker.push_request(1.0))[0]
        reply = configure(
            server,
            protocol="softsync:n=1",
            staleness="none",
            learning_rate=0.25,
            schedule="step:every=2,factor=0.5",
        )
        after = worker.push(*(worker.push_request(1.0, base_version=1) for _ in range(2)))
    assert (reply.protocol, reply.staleness, reply.schedule) == ("softsync:n=1", "none", "step:every=2,factor=0.5")
    assert [(rate.group, rate.base, rate.current) for rate in reply.learning_rates] == [(0, 0.25, 0.25)]
    assert (reply.gradients_settled, reply.updates_made) == (0, 0)
    assert [before.rate, *(receipt.rate for receipt in after)] == [1.0, 0.25, 0.125]
    told = status(server)
    assert (told.protocol, told.staleness, told.schedule) == (reply.protocol, reply.staleness, reply.schedule)
    assert [(rate.base, rate.current) for rate in told.learning_rates] == [(0.25, 0.125)]
    (change,) = [event for event in events(server).events if event.kind == "configured"]
    for word in ("softsync:n=1", "none", "step:every=2,factor=0.5", "0.25"):
        assert word in change.message


def test_gradients_that_wait_are_settled_and_counted(start_server: Start, tmp_path: Path) -> None:
    server = start_server(
        "--protocol", "hardsync", "--expected-workers", "2", "--update-log", str(tmp_path), "--log-gradients"
    )
    with WireWorker(server.data) as worker:
        worker.join()
        receipt = worker.push(worker.push_request(2.0))[0]
        assert receipt.outcome == common.OUTCOME_PENDING
        waiting = status(server)
        assert (waiting.pending_gradients, waiting.pending_bytes, waiting.workers_missing) == (1, 148, 1)
        assert inspect(server.control, "GetMemory").pending_bytes == 148
        assert inspect(server.control, "ListShards").shards[0].pending_gradients == 1
        reply = configure(server, protocol="async")
        assert (reply.gradients_settled, reply.updates_made) == (1, 1)
        worker.push(worker.push_request(1.0, base_version=1))
    settled = status(server)
    assert (settled.pending_gradients, settled.version_max, settled.updates) == (0, 2, 2)
    assert server.stop() == 0
    replayed = replay(log_paths(tmp_path)[0])
    assert (replayed.difference, replayed.ended, replayed.updates) == ("", True, 2)


def test_nothing_can_be_configured_without_a_run(start_server: Start) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        configure(start_server(), protocol="hardsync")
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


def test_who_waits_is_told_with_those_waited_for_and_for_how_long(start_server: Start) -> None:
    server = start_server("--protocol", "hardsync", "--expected-workers", "2")
    with WireWorker(server.data, "a") as a, WireWorker(server.data, "b") as b:
        for worker in (a, b):
            worker.join()
            worker.push(worker.push_request(1.0))
        assert status(server).roster == ["a", "b"]
        receipt = a.push(a.push_request(1.0, base_version=1))[0]
        assert (receipt.min_version, list(receipt.waiting_for)) == (2, ["b"])
        want = wire.PullRequest.Want(shard_id=0, held_version=1, min_version=2)
        pull = Thread(target=a.pull, args=([want],), kwargs={"wait_seconds": 15.0})
        pull.start()
        wait_until(lambda: worker_infos(server)["a"].waits_for == ["b"], what="the wait")
        (reason,) = status(server).waiting_for
        assert "b" in reason
        assert inspect(server.control, "ListShards").shards[0].waiting_for == ["b"]
        b.push(b.push_request(1.0, base_version=1))
        pull.join(15)
        assert not pull.is_alive()
        told = wait_until(lambda: [i for i in worker_infos(server).values() if i.blocked_seconds], what="blocked time")
        assert [worker.worker_id for worker in told] == ["a"]
        assert not worker_infos(server)["a"].waits_for
        assert status(server).blocked_seconds == told[0].blocked_seconds
        b.leave()
        after = worker_infos(server)
    assert (after["a"].counts, after["b"].counts) == (True, False)
    assert status(server).roster == ["a"]


def test_gradients_that_nobody_needed_are_counted_by_worker_shard_and_reason(start_server: Start) -> None:
    server = start_server("--protocol", "backup:b=1", "--expected-workers", "2")
    with WireWorker(server.data, "a") as a, WireWorker(server.data, "b") as b:
        a.join()
        b.join()
        # The first update waits for both.
        b.push(b.push_request(1.0))
        a.push(a.push_request(1.0))
        a.push(a.push_request(1.0, base_version=1))
        late = b.push(b.push_request(1.0, base_version=1))[0]
    assert late.reason == common.REASON_DROPPED
    told = status(server)
    assert (told.pushes_dropped, told.pushes_rejected, dict(told.rejected_by_reason)) == (1, 1, {"dropped": 1})
    workers = worker_infos(server)
    assert [workers[name].pushes_dropped for name in "ab"] == [0, 1]
    assert inspect(server.control, "ListShards").shards[0].pushes_dropped == 1


def test_staleness_is_told_by_worker_and_by_shard_with_the_step_that_it_cost(start_server: Start) -> None:
    server = start_server("--staleness", "divide")
    with WireWorker(server.data) as worker:
        worker.join()
        worker.push(*(worker.push_request(1.0) for _ in range(3)))
    whole = inspect(server.control, "GetStaleness")
    one = inspect(server.control, "GetStaleness", pb.GetStalenessRequest(shard_id=0))
    other = inspect(server.control, "GetStaleness", pb.GetStalenessRequest(shard_id=7))
    assert one == whole == inspect(server.control, "GetStaleness", pb.GetStalenessRequest(worker_id="a"))
    assert [(bucket.staleness, bucket.count) for bucket in one.buckets] == [(0, 1), (1, 1), (2, 1)]
    assert one.step_lost == pytest.approx(1 - (1 + 1 + 1 / 2) / 3)
    assert (other.count, other.step_lost) == (0, 0.0)
    shard = inspect(server.control, "ListShards").shards[0]
    worker_info = worker_infos(server)["a"]
    assert shard.step_lost == worker_info.step_lost == status(server).step_lost == one.step_lost
    assert (shard.staleness_mean, shard.staleness_max, shard.examples, shard.updates) == (1.0, 2, 3, 3)
    with pytest.raises(grpc.RpcError) as refused:
        inspect(server.control, "GetStaleness", pb.GetStalenessRequest(shard_id=0, worker_id="a"))
    assert "expected one of them, or none" in refused.value.details()


def test_events_come_oldest_first_and_go_on_after_a_number(start_server: Start) -> None:
    server = start_server()
    with WireWorker(server.data, "a") as a, WireWorker(server.data, "b") as b:
        a.join()
        b.join()
        b.leave()
        everything = events(server)
        first = events(server, limit=1)
        rest = events(server, after=first.newest)
        nothing = events(server, after=everything.newest)
    numbers = [event.number for event in everything.events]
    assert numbers == list(range(1, len(numbers) + 1))
    assert everything.newest == numbers[-1] and everything.forgotten == 0
    kinds = [event.kind for event in everything.events]
    assert kinds.count("joined") == 2 and kinds[-1] == "left"
    assert all("b" in event.message for event in everything.events if event.kind == "left")
    assert [event.number for event in (*first.events, *rest.events)] == numbers
    assert (list(nothing.events), nothing.newest) == ([], everything.newest)


def test_a_warm_up_and_a_growing_minibatch_are_told(start_server: Start) -> None:
    server = start_server(
        *("--warmup", "updates=2,protocol=serial", "--protocol", "softsync:n=2"),
        *("--batch-growth", "start=8,maximum=64,every=1,lr_scaling=linear", "--epoch-examples", "10"),
        *("--clip-norm", "100"),
    )
    with WireWorker(server.data) as worker:
        worker.join()
        warming = status(server)
        for version in range(2):
            worker.push(worker.push_request(1.0, base_version=version, example_count=5))
        warm = status(server)
    assert (warming.protocol, warming.warming_up, warm.warming_up) == ("softsync:n=2", True, False)
    assert "updates=2" in warm.warmup and warm.warmup == warming.warmup
    assert (warming.batch_size, warm.batch_size) == (8, 16)
    assert (warm.learning_rates[0].base, warm.learning_rates[0].current) == (1.0, 2.0)
    assert "start=8" in warm.batch_growth and warm.clip_norm == 100.0
