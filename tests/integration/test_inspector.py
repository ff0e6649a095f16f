"""The Inspector on a real server: what it says is what happened, and only its own machine may change it."""

import itertools
import socket
import zlib
from collections.abc import Iterator
from threading import Event, Thread

import grpc
import numpy as np
import psutil
import pytest

from pyps.watch.replay import replayed
from pyps_wire import common_pb2 as common
from pyps_wire import inspector_pb2 as pb
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.partition import Model, Tensor
from support import AnyServer, inspect, status_of, wait_until, workers_of
from wire_worker import WireWorker, values_of

MODEL = Model((Tensor("first", (40, 50)), Tensor("last", (3,)), Tensor("scalar", ())), shard_size=1008)


def test_status_tells_what_is_in_force_and_what_happened(start_server):
    server = start_server("--staleness", "divide")
    empty = status_of(server)
    assert (empty.state, empty.num_shards, empty.last_update_seconds) == (common.RUN_STATE_EMPTY, 0, -1)
    assert (empty.data_address, empty.control_address, empty.metrics_address) == (
        *(server.data, server.control, server.metrics),
    )
    with WireWorker(server.data) as worker:
        worker.join(value=5.0)
        first = worker.push_request(1.0, example_count=3)
        worker.push(first, first, worker.push_request(1.0), worker.push_request(float("nan")))
        status = status_of(server)
    assert (status.state, status.run_id, status.epoch) == (common.RUN_STATE_READY, "run-1", 0)
    assert (status.protocol, status.staleness, status.optimizer.rule) == ("async", "divide", "sgd")
    assert (status.num_shards, status.num_parameters, status.model_parameters) == (1, 37, 37)
    assert (status.version_min, status.version_max, status.workers_alive, status.examples) == (2, 2, 1, 4)
    tally = status.tally
    assert (tally.updates, tally.pushes_applied, tally.pushes_rejected, tally.pushes_duplicate) == (2, 2, 1, 1)
    assert (tally.staleness_mean, tally.staleness_max, tally.bytes_in) == (0.5, 1, 4 * 37 * 4)
    assert 0 <= status.last_update_seconds <= status.uptime_seconds


def test_shards_come_with_versions_and_checksums(start_server):
    server = start_server()
    assert not inspect(server.control, "ListShards").shards
    with WireWorker(server.data, model=MODEL) as worker:
        worker.join(value=1.0)
        assert worker.plan.num_shards == 2
        worker.push(worker.push_request(1.0, shard_id=1))
        shards = inspect(server.control, "ListShards").shards
        unread = inspect(server.control, "ListShards", pb.ListShardsRequest(without_checksums=True)).shards
        pulled = worker.pull()
    assert [(shard.shard_id, shard.offset, shard.version) for shard in shards] == [(0, 0, 0), (1, 1008, 1)]
    assert [shard.num_parameters for shard in shards] == [1008, 996]
    assert [shard.checksum for shard in shards] == [f"{zlib.crc32(shard.payload):08x}" for shard in pulled]
    assert [shard.tally.pushes_applied for shard in shards] == [0, 1]
    assert [(shard.version, shard.checksum) for shard in unread] == [(0, ""), (1, "")]


def test_tensors_are_summarised_over_shard_borders_and_come_in_pages(start_server):
    server = start_server()
    with WireWorker(server.data, model=MODEL) as worker:
        worker.join()
        gradient = [np.arange(1008, dtype=np.float32), np.arange(1008, 2004, dtype=np.float32)]
        worker.push(*(worker.push_request(values, shard_id=i) for i, values in enumerate(gradient)))
        vector = np.concatenate([values_of(shard) for shard in worker.pull()])

    first_page = inspect(server.control, "ListTensors", pb.ListTensorsRequest(page_size=2))
    assert [tensor.name for tensor in first_page.tensors] == ["first", "last"]
    rest = inspect(
        server.control, "ListTensors", pb.ListTensorsRequest(page_size=2, page_token=first_page.next_page_token)
    )
    assert [tensor.name for tensor in rest.tensors] == ["scalar"]
    assert rest.next_page_token == ""
    first = first_page.tensors[0]
    held = vector[:2000].astype(np.float64)
    assert (list(first.shape), first.held_parameters, first.version_min, first.version_max) == ([40, 50], 2000, 1, 1)
    assert (first.min, first.max) == (held.min(), held.max()) == (-1999, 0)
    assert first.norm == pytest.approx(float(np.linalg.norm(held)), rel=1e-12)
    assert list(first.first_values) == list(vector[:8])
    assert list(rest.tensors[0].shape) == []
    assert list(rest.tensors[0].first_values) == [vector[2003]]

    named = inspect(server.control, "ListTensors", pb.ListTensorsRequest(name_prefix="l"))
    assert [tensor.name for tensor in named.tensors] == ["last"]
    with pytest.raises(grpc.RpcError) as refused:
        inspect(server.control, "ListTensors", pb.ListTensorsRequest(page_token="next"))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "page_token is 'next'" in refused.value.details()


def test_staleness_and_receipts_are_reported_by_worker_and_by_shard(start_server):
    server = start_server("--staleness", "divide")
    with WireWorker(server.data, "a") as a, WireWorker(server.data, "b") as b:
        a.join()
        b.join()
        a.push(a.push_request(1.0))
        b.push(b.push_request(1.0), b.push_request(1.0))
        a.heartbeat(clock=17)
        b.leave()
        workers = workers_of(server.control)
        (shard,) = inspect(server.control, "ListShards").shards
        everybody, only_b, of_shard, elsewhere = (
            inspect(server.control, "GetStaleness", pb.GetStalenessRequest(**wanted))
            for wanted in ({}, {"worker_id": "b"}, {"shard_id": 0}, {"shard_id": 7})
        )
        receipts = inspect(server.control, "ListReceipts").receipts
        one = inspect(server.control, "ListReceipts", pb.ListReceiptsRequest(limit=1, worker_id="a")).receipts
    assert (workers["a"].state, workers["a"].clock, workers["a"].tally.pushes_applied) == ("alive", 17, 1)
    of_b = workers["b"].tally
    assert (workers["b"].state, of_b.staleness_mean, of_b.rate_scale_mean) == ("finished", 1.5, 0.75)
    assert [(bucket.staleness, bucket.count) for bucket in everybody.buckets] == [(0, 1), (1, 1), (2, 1)]
    tally = everybody.tally
    assert (tally.pushes_applied, tally.staleness_mean, tally.staleness_max, tally.updates) == (3, 1.0, 2, 3)
    assert tally.step_lost == pytest.approx(1 - (1 + 1 + 1 / 2) / 3)
    assert (of_shard, status_of(server).tally, shard.tally, shard.examples) == (everybody, tally, tally, 3)
    assert [bucket.staleness for bucket in only_b.buckets] == [1, 2]
    assert (of_b, of_b.step_lost) == (only_b.tally, 0.25)
    assert elsewhere == pb.StalenessHistogram(tally=pb.Tally(rate_scale_mean=1.0))
    with pytest.raises(grpc.RpcError) as refused:
        inspect(server.control, "GetStaleness", pb.GetStalenessRequest(shard_id=0, worker_id="a"))
    assert "expected one of them, or none" in refused.value.details()
    assert [(r.worker_id, r.receipt.version_after) for r in receipts] == [("b", 3), ("b", 2), ("a", 1)]
    assert [r.worker_id for r in one] == ["a"]


def test_memory_adds_up(start_server):
    server = start_server("--optimizer", "adagrad:learning_rate=0.1")
    with WireWorker(server.data, optimizer=common.OptimizerSettings()) as worker:
        worker.join()
        worker.push(worker.push_request(1.0))
        memory = inspect(server.control, "GetMemory")
    assert (memory.parameters_bytes, memory.slots_bytes, memory.ledger_entries) == (148, 148, 1)
    assert memory.in_flight_bytes == memory.first_parameters_bytes == 0
    assert 0 < memory.ledger_bytes < 2_000
    assert memory.resident_bytes > 10_000_000


def test_first_parameters_under_way_are_counted(start_server):
    server, ends = start_server(), Event()
    with WireWorker(server.data, model=Model((Tensor("t", (32,)),), shard_size=16)) as worker:
        messages = worker.initialize_messages(worker.hello().term)

        def some() -> Iterator[wire.InitializeRequest]:
            yield from itertools.islice(messages, 2)
            ends.wait(60)
            yield from messages

        call = worker.stub.Initialize.future(some(), timeout=60)
        wait_until(lambda: inspect(server.control, "GetMemory").first_parameters_bytes == 16 * 4, what="a shard")
        ends.set()
        call.result(60)
        assert inspect(server.control, "GetMemory").first_parameters_bytes == 0


def other_address() -> str | None:
    """An IPv4 address of this machine that is not loopback, None when there is none."""
    found = [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family is socket.AF_INET and not address.address.startswith("127.")
    ]
    return found[0] if found else None


def test_calls_that_change_the_server_are_taken_from_its_own_machine_only(start_server, tmp_path):
    host = other_address()
    if host is None:
        pytest.skip("this machine has no address but loopback")
    server = start_server("--host", "0.0.0.0", "--insecure", "--checkpoint-dir", str(tmp_path / "checkpoints"))
    port = server.control.rpartition(":")[2]
    with WireWorker(f"127.0.0.1:{server.data.rpartition(':')[2]}") as worker:
        worker.join()
    for method in ("SaveCheckpoint", "Reset", "Stop", "Configure"):
        with pytest.raises(grpc.RpcError) as refused:
            inspect(f"{host}:{port}", method)
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert f"{method} changes the server and is taken from its own machine only" in refused.value.details()
    assert inspect(f"{host}:{port}", "GetStatus").state == common.RUN_STATE_READY
    assert inspect(f"127.0.0.1:{port}", "SaveCheckpoint").path


# A run that is changed while it goes on, and looked at while its workers wait for each other.


def events(server: AnyServer, **wanted: int) -> pb.ListEventsReply:
    return inspect(server.control, "ListEvents", pb.ListEventsRequest(**wanted))


def test_a_wait_is_reported_with_the_workers_waited_for_and_its_time(start_server, tmp_path):
    server = start_server("--protocol", "hardsync", "--expected-workers", "2", "--update-log", str(tmp_path))
    with WireWorker(server.data, "a") as a, WireWorker(server.data, "b") as b:
        for worker in (a, b):
            worker.join()
            worker.push(worker.push_request(1.0))
        assert status_of(server).roster == ["a", "b"]
        receipt = a.push(a.push_request(1.0, base_version=1))[0]
        assert (receipt.min_version, list(receipt.waiting_for)) == (2, ["b"])
        want = wire.PullRequest.Want(shard_id=0, held_version=1, min_version=2)
        pull = Thread(target=a.pull, args=([want],), kwargs={"wait_seconds": 15.0})
        pull.start()
        wait_until(lambda: workers_of(server.control)["a"].waits_for == ["b"], what="the wait")
        (reason,) = status_of(server).waiting_for
        assert "b" in reason
        assert inspect(server.control, "ListShards").shards[0].waiting_for == ["b"]
        b.push(b.push_request(1.0, base_version=1))
        pull.join(15)
        assert not pull.is_alive()
        found = wait_until(
            lambda: [i for i in workers_of(server.control).values() if i.tally.blocked_seconds], what="blocked time"
        )
        assert [worker.worker_id for worker in found] == ["a"]
        assert not workers_of(server.control)["a"].waits_for
        assert status_of(server).tally.blocked_seconds == found[0].tally.blocked_seconds
        a.push(a.push_request(1.0, base_version=2))
        want = wire.PullRequest.Want(shard_id=0, held_version=2, min_version=3)
        pull = Thread(target=a.pull, args=([want],), kwargs={"wait_seconds": 15.0})
        pull.start()
        wait_until(lambda: workers_of(server.control)["a"].waits_for == ["b"], what="the second wait")
        b.leave()
        pull.join(15)
        after = workers_of(server.control)
        with pytest.raises(grpc.RpcError):
            a.pull([wire.PullRequest.Want(shard_id=0, min_version=9)], wait_seconds=0.2)
        a.push(a.push_request(1.0, base_version=3))
        found = activities(server, 9)
    steps = sorted((step.worker_id, step.sequence, step.outcome, step.updates) for step in found if step.outcome)
    pending, applied = (common.OUTCOME_PENDING, 0), (common.OUTCOME_APPLIED, 1)
    assert steps == [*(("a", each, *pending) for each in (1, 2, 3)), ("a", 4, *applied)] + [
        ("b", each, *applied) for each in (1, 2)
    ]
    waits = [(wait.worker_id, list(wait.waited_for)) for wait in found if not wait.outcome]
    assert waits == [("a", ["b"]), ("a", ["b"]), ("a", [])]
    # Nor does what a log has of them differ.
    kept = replayed(tmp_path).to_json()
    assert sorted((step[1], step[7]) for step in kept["steps"]) == [(step[0], step[3]) for step in steps]
    assert [(wait[1], wait[4]) for wait in kept["waits"]] == waits
    assert (after["a"].counts, after["b"].counts) == (True, False)
    assert status_of(server).roster == ["a"]


def activities(server: AnyServer, num: int, **wanted: int) -> list[pb.Activity]:
    """Return the steps and waits once there are so many."""

    def listed() -> list[pb.Activity] | None:
        reply = inspect(server.control, "ListActivity", pb.ListActivityRequest(**wanted))
        return list(reply.activities) if len(reply.activities) >= num else None

    return wait_until(listed, what="steps and waits")


def test_a_wait_to_begin_a_step_is_listed_with_the_worker_whose_step_ended_it(start_server):
    server = start_server("--protocol", "ssp:s=0", "--expected-workers", "2")
    with WireWorker(server.data, "a") as a, WireWorker(server.data, "b") as b:
        for worker in (a, b):
            worker.join()
        for clock, go_on in enumerate((lambda: b.proceed(0), lambda: b.proceed(1), b.leave)):
            ahead = Thread(target=a.proceed, args=(clock,))
            ahead.start()
            wait_until(lambda: workers_of(server.control)["a"].waits_for == ["b"], what="the wait")
            go_on()
            ahead.join(15)
        waits = activities(server, 3)
    assert [(wait.worker_id, list(wait.waited_for), wait.sequence) for wait in waits] == [("a", ["b"], 0)] * 3
    assert all(0 < wait.seconds < 15 and wait.age_seconds > 0 for wait in waits)


def test_events_come_oldest_first_and_go_on_after_a_number(start_server):
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
    assert [event.worker for event in everything.events if event.kind == "left"] == ["b"]
    assert [event.number for event in (*first.events, *rest.events)] == numbers
    assert (list(nothing.events), nothing.newest) == ([], everything.newest)


def test_a_warm_up_and_a_growing_minibatch_are_reported(start_server):
    server = start_server(
        *("--warmup", "updates=2,protocol=serial", "--protocol", "softsync:n=2"),
        *("--batch-growth", "start=8,maximum=64,every=1,lr_scaling=linear", "--epoch-examples", "10"),
        *("--clip-norm", "100"),
    )
    with WireWorker(server.data) as worker:
        worker.join()
        warming = status_of(server)
        for version in range(2):
            worker.push(worker.push_request(1.0, base_version=version, example_count=5))
        warm = status_of(server)
    assert (warming.protocol, warming.warming_up, warm.warming_up) == ("softsync:n=2", True, False)
    assert "updates=2" in warm.warmup and warm.warmup == warming.warmup
    assert (warming.batch_size, warm.batch_size) == (8, 16)
    assert (warm.learning_rates[0].base, warm.learning_rates[0].current) == (1.0, 2.0)
    assert "start=8" in warm.batch_growth and warm.clip_norm == 100.0
