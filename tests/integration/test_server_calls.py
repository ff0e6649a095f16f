"""The calls of ParameterServer on a real server, through generated stubs and through hand-made frames."""

from __future__ import annotations

import numpy as np

from pyps_wire import common_pb2 as common
from pyps_wire import framing
from pyps_wire import parameter_server_pb2 as wire
from wire_worker import SMALL, WireWorker, values_of


def test_a_worker_initialises_pushes_and_pulls(start_server):
    with WireWorker(start_server().data) as worker:
        welcome = worker.hello()
        assert welcome.state in (common.RUN_STATE_EMPTY, common.RUN_STATE_INITIALIZING)
        assert welcome.initialize
        reply = worker.initialize(welcome.term, value=5.0)
        assert reply.state == common.RUN_STATE_READY
        [receipt] = worker.push(worker.push_request(1.0))
        assert receipt.outcome == common.OUTCOME_APPLIED
        assert (receipt.version_before, receipt.version_after, receipt.staleness) == (0, 1, 0)
        [shard] = worker.pull()
        assert shard.version == 1
        np.testing.assert_array_equal(values_of(shard), np.full(37, 4.0, np.float32))


def test_hand_made_frames_and_generated_messages_mean_the_same(start_server):
    with WireWorker(start_server().data) as worker:
        worker.join(value=5.0)
        request = worker.push_request(2.0)
        payload = request.payload
        request.ClearField("payload")
        [receipt] = worker.push_frames([framing.join(request, payload)])
        assert receipt.outcome == common.OUTCOME_APPLIED
        [(header, values)] = worker.pull_frames()
        [shard] = worker.pull()
        assert (header.shard_id, header.version, header.codec) == (0, 1, common.CODEC_FLOAT32)
        np.testing.assert_array_equal(values, values_of(shard))
        np.testing.assert_array_equal(values, np.full(37, 3.0, np.float32))


def test_exchange_answers_each_shard_with_receipt_and_newest_parameters(start_server):
    with WireWorker(start_server().data) as worker:
        worker.join(value=5.0)
        requests = [worker.push_request(1.0), worker.push_request(1.0, base_version=1)]
        replies = list(worker.stub.Exchange(iter(requests), timeout=20))
        assert [reply.receipt.version_after for reply in replies] == [1, 2]
        assert [reply.version for reply in replies] == [1, 2]
        np.testing.assert_array_equal(np.frombuffer(replies[1].payload, np.float32), np.full(37, 3.0))


def test_pull_sends_only_what_is_newer_than_held(start_server):
    with WireWorker(start_server().data) as worker:
        worker.join()
        want = wire.PullRequest.Want(shard_id=0, held_version=0)
        assert worker.pull([want]) == []
        worker.push(worker.push_request(1.0))
        assert [shard.version for shard in worker.pull([want])] == [1]


def test_pull_under_another_epoch_sends_everything(start_server):
    with WireWorker(start_server().data) as worker:
        worker.join()
        worker.epoch = 7
        want = wire.PullRequest.Want(shard_id=0, held_version=100, min_version=101)
        assert [shard.version for shard in worker.pull([want], wait_seconds=5)] == [0]


def test_pull_writes_the_codec_that_was_asked_for(start_server):
    with WireWorker(start_server().data) as worker:
        worker.join(value=1.5)
        request = wire.PullRequest(sender=worker.sender, codec=common.CODEC_FLOAT16)
        [shard] = worker.stub.Pull(request, timeout=20)
        assert shard.codec == common.CODEC_FLOAT16
        np.testing.assert_array_equal(np.frombuffer(shard.payload, np.float16), np.full(37, 1.5))


def test_a_push_sent_twice_is_applied_once_and_gets_its_first_receipt(start_server):
    with WireWorker(start_server().data) as worker:
        worker.join()
        request = worker.push_request(1.0)
        [first] = worker.push(request)
        worker.push(worker.push_request(1.0, base_version=1))
        [second] = worker.push(request)
        assert second.duplicate
        second.duplicate = False
        assert second == first
        assert worker.pull()[0].version == 2


def test_receipts_come_in_the_order_of_the_pushes(start_server):
    with WireWorker(start_server().data) as worker:
        worker.join()
        requests = [worker.push_request(0.0, base_version=index) for index in range(50)]
        receipts = worker.push(*requests)
        assert [receipt.sequence for receipt in receipts] == [request.sequence for request in requests]
        assert [receipt.version_after for receipt in receipts] == list(range(1, 51))


def test_extents_leave_the_rest_of_the_shard_alone(start_server):
    with WireWorker(start_server().data) as worker:
        worker.join(value=5.0)
        request = worker.push_request(np.ones(7, np.float32))
        request.extents.add(offset=30, length=7)
        [receipt] = worker.push(request)
        assert receipt.outcome == common.OUTCOME_APPLIED
        values = values_of(worker.pull()[0])
        np.testing.assert_array_equal(values, [5.0] * 30 + [4.0] * 7)


def test_an_observer_is_told_the_model_and_counts_as_no_worker(start_server):
    server = start_server()
    with WireWorker(server.data) as worker, WireWorker(server.data, "eye", run_id="") as observer:
        worker.join(value=2.0)
        request = wire.HelloRequest(protocol_version=1, role=common.ROLE_OBSERVER, sender=observer.sender)
        reply = observer.stub.Hello(request, timeout=20)
        assert reply.run_id == "run-1"
        assert [tensor.name for tensor in reply.model.tensors] == [t.name for t in SMALL.tensors]
        pull = wire.PullRequest(sender=observer.sender, role=common.ROLE_OBSERVER)
        [shard] = observer.stub.Pull(pull, timeout=20)
        np.testing.assert_array_equal(values_of(shard), np.full(37, 2.0))
        [receipt] = worker.push(worker.push_request(1.0))
        assert receipt.num_workers == 1


def test_hello_tells_limits_protocol_and_settings(start_server):
    server = start_server("--max-workers", "5", "--heartbeat-seconds", "2", "--optimizer", "sgd:learning_rate=1")
    with WireWorker(server.data) as worker:
        reply = worker.join()
        assert reply.limits.workers_max == 5
        assert reply.limits.message_bytes_max == 16 * 2**20
        assert (reply.heartbeat_seconds, reply.lease_seconds) == (2.0, 30.0)
        assert (reply.protocol, reply.staleness) == ("async", "divide")
        assert reply.optimizer.rule == "sgd"
        assert reply.control_address == server.control
