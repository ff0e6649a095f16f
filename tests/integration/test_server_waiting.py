"""Waiting and load on a real server: a wait ends with what it waited for, and one caller holds up no other."""

import contextlib
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import grpc
import numpy as np
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from client_support import gradients_like, make_client, small_model
from pyps.service import calls
from pyps.service.calls import LATE_MIN
from pyps_wire import common_pb2 as common
from pyps_wire import inspector_pb2
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.contract import METHODS, PARAMETER_SERVER, stub_of
from pyps_wire.partition import Model, Tensor
from support import connected, inspect, memory_in_flight, status_of, wait_until, workers_of
from wire_worker import CHANNEL_OPTIONS, WireWorker, crew, parked_pull, refusal_of

# Four shards of a megabyte each.
LARGE = Model((Tensor("x", (1_048_576,)),), shard_size=262_144)
SHARD_BYTES = 4 * 262_144


def test_a_pull_brings_what_is_newer_than_held_and_under_another_epoch_everything(start_server):
    with WireWorker(start_server().data) as worker:
        worker.join()
        want = wire.PullRequest.Want(shard_id=0, held_version=0)
        assert worker.pull([want]) == []
        worker.push(worker.push_request(1.0))
        assert [shard.version for shard in worker.pull([want])] == [1]
        worker.epoch = 7
        want = wire.PullRequest.Want(shard_id=0, held_version=100, min_version=101)
        assert [shard.version for shard in worker.pull([want], wait_seconds=5)] == [1]


def test_pulls_are_parked_until_the_version_arrives_and_say_what_they_wait_for(start_server):
    server = start_server()
    with crew(server, 3) as workers:
        pulls = [parked_pull(worker, 1) for worker in workers]
        waits = wait_until(lambda: (w := status_of(server).waiting_for) and len(w) == 3 and w, 60, "three waits")
        assert any("w2 waits for version 1 of shard 0, which is at 0" in wait for wait in waits)
        want = wire.PullRequest.Want(shard_id=0, held_version=0, min_version=3)
        status, name, text = refusal_of(workers[0].pull, [want], wait_seconds=0.3)
        assert (status, name) == ("DEADLINE_EXCEEDED", "WaitTimedOut")
        for word in ("0.3 s", "w0 waits for version 3 of shard 0", "at 0", "live workers: w0, w1, w2"):
            assert word in text
        workers[0].push(workers[0].push_request(1.0))
        for pull in pulls:
            assert [shard.version for shard in pull] == [1]
        assert list(status_of(server).waiting_for) == []


def test_a_caller_that_does_not_take_the_first_answer_gets_the_reason(start_server, monkeypatch):
    monkeypatch.setattr(calls, "CROWDED_WRITE_SECONDS", 3.0)
    monkeypatch.setattr(calls, "WRITE_SECONDS", 3.0)
    server = start_server()
    # A shard is more than this caller lets gRPC receive ahead.
    narrow = [*CHANNEL_OPTIONS, ("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    with WireWorker(server.data, model=LARGE) as worker, grpc.insecure_channel(server.data, options=narrow) as channel:
        worker.join()
        want = wire.PullRequest.Want(shard_id=0, held_version=-1)
        request = wire.PullRequest(sender=worker.sender, wants=[want])
        pull = stub_of(PARAMETER_SERVER, channel).Pull(request, timeout=60)
        wait_until(lambda: inspect(server.control, "GetMemory").in_flight_bytes, 20, "the answer to be held")
        wait_until(lambda: not inspect(server.control, "GetMemory").in_flight_bytes, 20, "its memory to be free")
        status, name, text = refusal_of(list, pull)
        assert (status, name) == ("DEADLINE_EXCEEDED", "WaitTimedOut")
        assert "the caller took no reply" in text


def test_shards_that_are_ready_do_not_wait_for_those_that_are_not(start_server):
    server = start_server()
    with WireWorker(server.data, model=LARGE) as worker:
        worker.join()
        wants = [wire.PullRequest.Want(shard_id=i, held_version=-1, min_version=int(i == 0)) for i in range(4)]
        request = wire.PullRequest(sender=worker.sender, wants=wants, wait_milliseconds=30_000)
        pull = worker.stub.Pull(request, timeout=40)
        assert sorted(next(pull).shard_id for _ in range(3)) == [1, 2, 3]
        worker.push(worker.push_request(1.0, 0))
        last = next(pull)
        assert (last.shard_id, last.version) == (0, 1)


def test_a_pull_parked_when_the_run_is_reset_is_told_so(start_server):
    server = start_server()
    with WireWorker(server.data) as worker:
        worker.join()
        pull = parked_pull(worker, 1, seconds=20)
        wait_until(lambda: status_of(server).waiting_for, 10, "the parked pull")
        inspect(server.control, "Reset", inspector_pb2.ResetRequest(run_id="run-1"))
        assert refusal_of(list, pull)[1:] == ("NotInitialized", "the run was reset while the pull waited")


def test_pulls_that_nobody_reads_are_held_a_shard_each_and_disturb_nobody(start_server):
    server = start_server("--optimizer", "sgd:learning_rate=1")
    with WireWorker(server.data, model=LARGE) as worker, deaf_channel(server) as deaf, contextlib.ExitStack() as stack:
        worker.join()
        request = wire.PullRequest(sender=worker.sender)
        pulls = [stub_of(PARAMETER_SERVER, deaf).Pull(request, timeout=100) for _ in range(8)]
        for pull in pulls:
            stack.callback(pull.cancel)
        wait_until(lambda: memory_in_flight(server) >= 8 * SHARD_BYTES, 60, "a shard of each pull")
        assert inspect(server.control, "GetMemory").serialized_bytes >= SHARD_BYTES
        with WireWorker(server.data, "lively", model=LARGE) as lively:
            lively.join()
            for version in range(10):
                pushed = [lively.push_request(0.0, shard, base_version=version) for shard in range(4)]
                assert len(lively.push(*pushed)) == len(lively.pull()) == 4
        assert memory_in_flight(server) <= 8 * 2 * SHARD_BYTES
        for pull in pulls:
            assert sorted(shard.shard_id for shard in pull) == [0, 1, 2, 3]


def test_a_server_s_resident_memory_keeps_to_the_budget_of_what_callers_make_it_hold(start_server_process):
    """Each pull that nobody reads would hold a frame of its own, twice 4 MiB, as the shard has moved on meanwhile."""
    budget_bytes = 33 * 2**20
    model = Model((Tensor("x", (2**22,)),), shard_size=2**20)
    server = start_server_process("--max-in-flight-bytes", str(budget_bytes))
    with WireWorker(server.data, model=model) as worker, deaf_channel(server) as deaf:
        worker.join()
        worker.pull()
        resident, pulls = psutil.Process(server.pid).memory_info, []
        before = resident().rss
        for version in range(40):
            push = worker.push_request(0.0, base_version=version, payload=bytes(4))
            push.extents.add(length=1)
            assert worker.push(push)[0].version_after == version + 1
            held = memory_in_flight(server)
            request = wire.PullRequest(sender=worker.sender, wants=[wire.PullRequest.Want(held_version=-1)])
            pulls.append(pull := stub_of(PARAMETER_SERVER, deaf).Pull(request, timeout=100))
            wait_until(lambda p=pull, h=held: p.done() or memory_in_flight(server) > h, 60, "a pull held or refused")
        # As much as is left free by them, since they are one worker's.
        assert sum(not pull.done() for pull in pulls) == 4
        # gRPC has a copy of what it sends. Were all 40 held, there would be 320 MiB more.
        assert resident().rss - before < 3 * budget_bytes
        for pull in pulls:
            pull.cancel()


def test_what_waits_for_one_worker_s_scale_leaves_another_room_for_an_exchange(start_server):
    """In so little memory that of all callers observers alone have a reserve, for three shards of 120,000 bytes."""
    model = Model((Tensor("x", (4 * 30_000,)),), shard_size=30_000)
    server, requests = start_server("--max-in-flight-bytes", str(2**20)), SimpleQueue()
    with WireWorker(server.data, "a", model=model) as first, WireWorker(server.data, "b", model=model) as second:
        first.join(), second.hello()
        answers, outcomes = first.stub.Exchange(iter(requests.get, None), timeout=60), []
        for shard_id in range(4):
            requests.put(first.push_request(1.0, shard_id, sequence=1, scale_follows=True))
            outcomes.append(next(answers).receipt.outcome)
        [reply] = second.stub.Exchange(iter([second.push_request(1.0)]), timeout=60)
        assert reply.receipt.outcome == common.OUTCOME_APPLIED
        assert outcomes == [common.OUTCOME_HELD, *(3 * [common.OUTCOME_NOT_HELD])]
        requests.put(None)


@pytest.mark.parametrize("transport", ["grpc", "tcp"])
def test_fifty_names_with_pulls_that_they_do_not_read_leave_a_worker_its_pace(start_server, transport):
    model, budget_bytes = Model(LARGE.tensors, shard_size=65_536), 84 * 2**20
    server = start_server("--max-in-flight-bytes", str(budget_bytes))
    with WireWorker(server.data, "greedy", model=model) as greedy, contextlib.ExitStack() as stack:
        greedy.join()
        pulls = []
        for number in range(50):
            if number % 3 == 0:
                deaf = stack.enter_context(deaf_channel(server))
                grpc.channel_ready_future(deaf).result(60)
            greedy.sender.worker_id, greedy.sender.secret = f"g{number}", secrets.token_bytes(16)
            greedy.hello()
            pulls += [
                stub_of(PARAMETER_SERVER, deaf).Pull(wire.PullRequest(sender=greedy.sender), timeout=100)
                for _ in range(9)
            ]
        for pull in pulls:
            stack.callback(pull.cancel)
        wait_until(lambda: any(pull.done() for pull in pulls), 60, "a refusal")
        with make_client(
            server.data,
            run_id="run-1",
            tensors={"x": np.zeros(1_048_576, np.float32)},
            optimizer=("sgd", {"learning_rate": 1}),
            shard_size=65_536,
            transport=transport,
            loss_wait_seconds=5,
        ) as honest:
            honest.pull()
            began = time.monotonic()
            for _ in range(10):
                honest.exchange({"x": np.zeros(1_048_576, np.float32)})
            assert time.monotonic() - began < 20
        assert memory_in_flight(server) > budget_bytes / 2


def test_of_messages_that_do_not_come_few_are_waited_for_whoever_sends_them(start_server, monkeypatch):
    """Each may be one of which gRPC holds nearly all, on any number of connections."""
    monkeypatch.setattr(calls, "LATE_SECONDS", 0.05)
    server, ends = start_server("--max-workers", "2"), threading.Event()

    def never():
        ends.wait(60)
        yield from ()

    with make_client(server.data, transport="grpc") as honest, contextlib.ExitStack() as stack:
        honest.pull()
        honest.push(gradients_like(small_model(), seed=1))
        channels = [stack.enter_context(connected(server.data)) for _ in range(2)]
        stack.callback(ends.set)
        for name in ("Exchange", "Push", "Stage", "Initialize", "Hello"):
            silent = [
                channel.stream_stream(METHODS[name])(never(), timeout=60) for channel in channels for _ in range(12)
            ]
            ended = wait_until(lambda s=silent: len(d := [c for c in s if c.done()]) >= 24 - LATE_MIN and d, 60, name)
            assert all("calls had waited for their messages" in call.details() for call in ended), name
            # Which a client makes again, in either case.
            assert {call.code().name for call in ended} == {"UNAVAILABLE" if name == "Hello" else "RESOURCE_EXHAUSTED"}
            assert inspect(server.control, "GetMemory").late_messages <= LATE_MIN
            for call in silent:
                call.cancel()
        # Its stream was the one that had waited longest.
        honest.push(gradients_like(small_model(), seed=2))
        assert min(worker.tally.pushes_applied for worker in workers_of(server.control).values()) > 0
    assert "Traceback" not in server.output()


def test_what_a_call_sends_beyond_its_one_message_is_not_held(start_server):
    with WireWorker(start_server().data) as worker:
        for method in ("Pull", "Proceed", "Heartbeat"):
            call = worker.channel.stream_stream(METHODS[method])
            refused = refusal_of(lambda call=call: list(call(iter([b""] * 2), timeout=60)))
            assert refused[:2] == ("INVALID_ARGUMENT", "InvalidArgument") and "more than one message" in refused[2]


def test_a_long_message_counts_while_its_call_lasts(start_server):
    server = start_server("--max-in-flight-bytes", str(2**20))
    with WireWorker(server.data) as worker:
        status, name, text = refusal_of(worker.hello, software="x" * 2**20)
        assert (status, name) == ("INVALID_ARGUMENT", "InvalidArgument") and "--max-in-flight-bytes" in text
        worker.join()


def deaf_channel(server) -> grpc.Channel:
    """A channel on which nothing flows that nobody reads: gRPC would widen its windows as it sees fit."""
    return grpc.insecure_channel(server.data, options=[*CHANNEL_OPTIONS, ("grpc.http2.bdp_probe", 0)])


def test_the_control_plane_answers_while_the_data_plane_is_full(start_server):
    server, ends = start_server(), threading.Event()
    # Shards so small that they are updated on the event loop, one after the other and without a pause.
    model = Model((Tensor("x", (50_000,)),))

    def flood(worker: WireWorker) -> int:
        requests = iter(lambda: None if ends.is_set() else worker.push_request(0.0), None)
        return sum(1 for _ in worker.stub.Push(requests, timeout=60))

    with crew(server, 2, model=model) as workers, connected(server.control) as channel, ThreadPoolExecutor(2) as pool:
        floods = [pool.submit(flood, worker) for worker in workers]
        try:
            wait_until(lambda: inspect(server.control, "GetStatus").tally.updates > 10)
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
            for method in ("ListShards", "ListWorkers", "ListTensors", "ListEvents", "GetMemory"):
                inspect(server.control, method)
            before = inspect(server.control, "GetStatus").tally.updates
            wait_until(lambda: inspect(server.control, "GetStatus").tally.updates > before)
        finally:
            ends.set()
        assert all(f.result(60) for f in floods)


def test_an_initialisation_that_stops_half_way_ends_and_holds_nothing(start_server, monkeypatch):
    monkeypatch.setattr(calls, "READ_SECONDS", 0.2)
    server, ends = start_server(), threading.Event()
    with WireWorker(server.data, model=LARGE) as worker:
        term = worker.hello().term

        def stops_half_way():
            messages = worker.initialize_messages(term, 1.0)
            yield from (next(messages) for _ in range(3))
            ends.wait(60)

        refused = refusal_of(worker.stub.Initialize, stops_half_way(), timeout=60)
        ends.set()
        assert refused[:2] == ("DEADLINE_EXCEEDED", "WaitTimedOut") and "0.2 s" in refused[2]
        assert inspect(server.control, "GetMemory").first_parameters_bytes == 0
        worker.initialize(term, 2.0)
        assert [shard.version for shard in worker.pull()] == [0] * 4
