"""Rounds over shared memory on a real server, spoken by hand: they do what the same calls over gRPC do."""

import contextlib
import threading

import numpy as np
import pytest

from pyps_wire import common_pb2 as common
from pyps_wire.errors import InvalidArgument, NotInitialized
from pyps_wire.partition import Model, Tensor
from support import configure, status_of, wait_until
from wire_worker import SMALL, LocalWorker, WireWorker, at_once, local_worker, values_of

# Several shards in either group: more than is handled on the event loop.
LARGE = Model((Tensor("x", (500_000,)), Tensor("y", (300_000,), group=1)), shard_size=160_000)


def test_a_round_updates_the_parameters_in_the_workers_own_memory(start_server):
    with local_worker(start_server().data) as worker:
        worker.gradients[0][0][:] = 2.0
        [reply] = worker.exchange()
        assert reply.receipt.outcome == common.OUTCOME_APPLIED
        assert (reply.version, reply.epoch, reply.codec) == (1, 0, common.CODEC_FLOAT32)
        np.testing.assert_array_equal(worker.parameters[0], np.full(37, -2.0, np.float32))
        [shard] = worker.pull()
        np.testing.assert_array_equal(values_of(shard), worker.parameters[0])


def test_statistics_count_shared_memory_as_they_count_messages(start_server):
    server = start_server()
    with local_worker(server.data, model=LARGE) as worker:
        worker.exchange()
        worker.exchange(pull=False)
        status = status_of(server)
    model_bytes = 4 * 800_000
    # The first pull and the first exchange wrote everything.
    assert (status.tally.bytes_in, status.tally.bytes_out) == (2 * model_bytes, 2 * model_bytes)


def test_only_what_is_newer_than_held_is_written(start_server):
    with local_worker(start_server().data) as worker:
        worker.exchange(pull=False)
        assert worker.parameters[0][0] == 0.0
        worker.gradients[0][0][:] = 1.0
        [reply] = worker.exchange(pull=False)
        assert (reply.receipt.version_after, reply.codec) == (2, 0)
        assert worker.parameters[0][0] == 0.0
        assert [shard.version for shard in worker.pull_here()] == [2]
        assert worker.parameters[0][0] == -1.0
        assert worker.pull_here() == []
        # A duplicate changes nothing, and the worker holds what there is.
        request = worker.exchange_request()
        assert worker.exchanged(request)[0].version == 3
        request.exchange.shards[0].held_version = 3
        worker.parameters[0][:] = 7.0
        [again] = worker.exchanged(request)
        assert (again.receipt.duplicate, again.receipt.version_after, again.codec) == (True, 3, 0)
        assert worker.parameters[0][0] == 7.0


@pytest.mark.parametrize("model", [SMALL, LARGE], ids=["on the event loop", "on threads"])
def test_nan_in_one_shard_refuses_all_shards_of_the_round(start_server, model):
    with local_worker(start_server().data, model=model) as worker:
        worker.gradients[0][-1][-1] = np.nan
        replies = worker.exchange()
        assert {reply.receipt.reason for reply in replies} == {common.REASON_NOT_FINITE}
        assert {reply.receipt.version_after for reply in replies} == {0}
        assert all("NaN or infinity for parameter" in reply.receipt.message for reply in replies)
        worker.gradients[0][-1][-1] = 0.5
        assert {reply.receipt.version_after for reply in worker.exchange()} == {1}


def test_either_set_of_gradients_may_be_pushed(start_server):
    with local_worker(start_server().data, gradients=2) as worker:
        worker.gradients[0][0][:], worker.gradients[1][0][:] = 1.0, 10.0
        worker.exchange(gradients=1)
        assert worker.parameters[0][0] == -10.0
        worker.exchange(gradients=0)
        assert worker.parameters[0][0] == -11.0


@pytest.mark.parametrize("model", [SMALL, LARGE], ids=["on the event loop", "on threads"])
def test_a_round_that_waits_for_others_is_pulled_when_it_is_over(start_server, model):
    server = start_server("--protocol", "hardsync", "--expected-workers", "2")
    with (
        local_worker(server.data, "shared", model=model) as shared,
        WireWorker(server.data, "wired", model=model) as wired,
    ):
        wired.join()
        for vector in shared.gradients[0]:
            vector[:] = 1.0
        replies = shared.exchange()
        assert {reply.receipt.outcome for reply in replies} == {common.OUTCOME_PENDING}
        assert {reply.codec for reply in replies} == {0}
        # What waits was copied: the worker's memory is its own again.
        for vector in shared.gradients[0]:
            vector[:] = 100.0
        wanted = {reply.receipt.shard_id: reply.receipt.min_version for reply in replies}
        assert set(wanted.values()) == {1}
        pull = threading.Thread(target=shared.pull_here, args=(wanted,))
        pull.start()
        wait_until(lambda: list(status_of(server).waiting_for), 20, "the parked pull")
        wired.push_step(3.0)
        pull.join(20)
        assert set(shared.versions.values()) == {1}
        for vector in shared.parameters:
            np.testing.assert_array_equal(vector, np.full(vector.size, -2.0, np.float32))


def test_a_change_to_one_mutex_and_back_is_felt_in_the_next_round(start_server):
    server = start_server()
    with local_worker(server.data, model=LARGE) as worker:
        assert {reply.version for reply in worker.exchange()} == {1}
        configure(server, protocol="asgd:mutex=whole")
        assert {reply.version for reply in worker.exchange()} == {2}
        with pytest.raises(InvalidArgument, match=f"holds 2 of the push's {worker.plan.num_shards} shards"):
            worker.exchange([0, 1])
        worker.exchange(pull=False)
        assert len(worker.pull_here()) == worker.plan.num_shards
        configure(server, protocol="async")
        assert {reply.version for reply in worker.exchange()} == {4}


def test_eight_workers_at_once_lose_nothing_and_read_nothing_torn(start_server):
    server, rounds = start_server(), 20
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(local_worker(server.data, f"w{index}", model=LARGE)) for index in range(8)]

        def train(worker: LocalWorker) -> None:
            for vector in worker.gradients[0]:
                vector[:] = 1.0
            for _ in range(rounds):
                worker.exchange()
                for shard in worker.plan.shards:
                    values = worker.parameters[shard.group][shard.offset : shard.offset + shard.length]
                    # Every update adds the same to all numbers of a shard.
                    assert values.min() == values.max()

        at_once([lambda worker=worker: train(worker) for worker in workers])
        assert status_of(server).version_max == 8 * rounds


def test_requests_in_one_stream_are_answered_one_by_one(start_server):
    with local_worker(start_server().data, model=LARGE) as worker:
        requests = [worker.exchange_request(), worker.pull_request(), worker.exchange_request([0])]
        for request in requests:
            worker.link.send(request)
        replies = [worker.link.receive() for _ in requests]
        assert [reply.WhichOneof("reply") for reply in replies] == ["exchanged", "pulled", "exchanged"]
        assert replies[2].exchanged.replies[0].version == 2


def test_a_request_may_come_byte_by_byte(start_server):
    with local_worker(start_server().data) as worker:
        message = worker.exchange_request().SerializeToString()
        for byte in len(message).to_bytes(4, "little") + message:
            worker.link.socket.sendall(bytes([byte]))
        assert worker.link.receive().exchanged.replies[0].version == 1


def test_workers_are_offered_it_and_observers_hear_where_but_get_no_ticket(start_server):
    with WireWorker(start_server().data) as worker:
        offer = worker.hello().local
        assert offer.address.startswith("@pyps-")
        assert len(offer.ticket) == 16
        noticed = worker.hello(role=common.ROLE_OBSERVER).local
        assert (noticed.address, noticed.ticket) == (offer.address, b"")
    with WireWorker(start_server("--local-socket", "off").data) as worker:
        assert not worker.hello().HasField("local")
        assert not worker.hello(role=common.ROLE_OBSERVER).HasField("local")


def test_memory_can_be_attached_once_there_are_parameters(start_server):
    with LocalWorker(start_server().data) as worker:
        welcome = worker.hello()
        with pytest.raises(NotInitialized, match="no parameters yet"):
            worker.attach()
        worker.initialize(welcome.term)
        worker.attach()
        assert worker.pull_here()
