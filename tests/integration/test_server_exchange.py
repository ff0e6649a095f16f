"""Exchange on a real server: pushes answered with the parameters after them in one stream, and pushes as a whole."""

import queue
from collections.abc import Iterator

import numpy as np
import pytest

from pyps_wire import common_pb2 as common
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.contract import METHODS
from pyps_wire.partition import Model, Tensor
from support import configure, memory_in_flight, status_of, wait_until
from wire_worker import WireWorker, at_once, crew, refusal_of, values_of

# Four shards of a megabyte each: their work is done on threads.
LARGE = Model((Tensor("x", (1_048_576,)),), shard_size=262_144)
TWO_SMALL = Model((Tensor("x", (32,)),), shard_size=16)


class Exchange:
    """One stream that stays open: `ask` sends a message and takes the reply to it."""

    def __init__(self, worker: WireWorker):
        self._requests: queue.SimpleQueue[wire.PushRequest | None] = queue.SimpleQueue()
        self.replies: Iterator[wire.ExchangeReply] = worker.stub.Exchange(iter(self._requests.get, None), timeout=60)

    def send(self, request: wire.PushRequest) -> None:
        self._requests.put(request)

    def ask(self, request: wire.PushRequest) -> wire.ExchangeReply:
        self.send(request)
        return next(self.replies)

    def end(self) -> list[wire.ExchangeReply]:
        self._requests.put(None)
        return list(self.replies)


@pytest.mark.parametrize("model", [TWO_SMALL, LARGE], ids=["small", "large"])
def test_one_stream_takes_any_number_of_pushes(start_server, model):
    with WireWorker(start_server().data, model=model) as worker:
        worker.join(value=100.0)
        exchange, shard_ids = Exchange(worker), range(worker.plan.num_shards)
        for step in range(20):
            for shard_id in shard_ids:
                # Each reply comes before the next message is sent.
                reply = exchange.ask(worker.push_request(1.0, shard_id, base_version=step, held_version=step))
                assert (reply.receipt.shard_id, reply.receipt.version_after, reply.version) == (
                    shard_id,
                    *[step + 1] * 2,
                )
                assert set(values_of(reply)) == {99.0 - step}
        assert exchange.end() == []


def test_workers_that_send_shards_in_opposite_orders_are_answered_in_theirs(start_server):
    server = start_server(env={"PYPS_THREADS": "2"})
    with crew(server, 2, model=LARGE) as workers:

        def train(worker: WireWorker, order: range) -> None:
            requests = [worker.push_request(1.0, shard_id) for _ in range(10) for shard_id in order]
            replies = list(worker.stub.Exchange(iter(requests), timeout=60))
            assert [reply.receipt.shard_id for reply in replies] == [*order] * 10
            assert [reply.receipt.sequence for reply in replies] == [request.sequence for request in requests]
            for reply in replies:
                assert reply.version == reply.receipt.version_after == reply.receipt.version_before + 1

        at_once([lambda: train(workers[0], range(4)), lambda: train(workers[1], range(3, -1, -1))])
        assert {shard.version for shard in workers[0].pull()} == {20}
    assert memory_in_flight(server) == 0


def test_of_a_worker_that_takes_no_reply_three_messages_are_held_and_others_are_served(start_server):
    server = start_server("--optimizer", "sgd:learning_rate=1")
    with WireWorker(server.data, "deaf", model=LARGE) as deaf, WireWorker(server.data, "lively", model=LARGE) as lively:
        deaf.join()
        lively.join()
        requests = (deaf.push_request(0.0, index % 4).SerializeToString() for index in range(64))
        call = deaf.channel.stream_stream(METHODS["Exchange"])(requests, timeout=100)
        wait_until(lambda: memory_in_flight(server) > 5 * 2**20, 20, "three messages and their replies")
        for _ in range(10):
            assert len(list(lively.stub.Exchange((lively.push_request(0.0, i) for i in range(4)), timeout=20))) == 4
        # What the link itself takes in is answered too.
        assert status_of(server).tally.pushes_applied < 40 + 32
        assert memory_in_flight(server) < 3 * 2 * 2**20 + 2**16
        assert [wire.ExchangeReply.FromString(reply).receipt.shard_id for reply in call] == [0, 1, 2, 3] * 16
    assert memory_in_flight(server) == 0


@pytest.mark.parametrize("model", [TWO_SMALL, LARGE], ids=["small", "large"])
def test_an_error_in_the_middle_comes_after_the_answers_before_it(start_server, model):
    server = start_server()
    with WireWorker(server.data, model=model) as worker:
        worker.join()
        bad = worker.push_request(np.ones(3, np.float32), 1)
        exchange = Exchange(worker)
        for request in (worker.push_request(1.0, 0), bad):
            exchange.send(request)
        assert next(exchange.replies).receipt.outcome == common.OUTCOME_APPLIED
        status, name, text = refusal_of(next, exchange.replies)
        assert (status, name) == ("INVALID_ARGUMENT", "WrongSize")
        assert "shard 1" in text
        assert {shard.shard_id: shard.version for shard in worker.pull() if shard.version} == {0: 1}
        assert [reply.version for reply in worker.stub.Exchange(iter([worker.push_request(1.0, 1)]), timeout=20)] == [1]
    assert memory_in_flight(server) == 0
    assert "Traceback" not in server.output()


def test_parameters_come_only_where_they_are_newer_than_those_held(start_server):
    with WireWorker(start_server().data) as worker:
        worker.join(value=5.0)
        exchange = Exchange(worker)
        assert exchange.ask(worker.push_request(1.0, held_version=0)).version == 1
        # A push that is refused leaves what is held the newest.
        refused = exchange.ask(worker.push_request(float("nan"), base_version=1, held_version=1))
        assert refused.receipt.reason == common.REASON_NOT_FINITE
        assert (refused.codec, refused.version, refused.payload) == (common.CODEC_UNSPECIFIED, 0, b"")
        behind = exchange.ask(worker.push_request(float("nan"), base_version=1, held_version=0))
        assert (behind.codec, behind.version, set(values_of(behind))) == (common.CODEC_FLOAT32, 1, {4.0})
        # A worker that names no version, or one of another epoch, always gets the parameters.
        assert exchange.ask(worker.push_request(float("nan"), base_version=1)).version == 1
        other = exchange.ask(worker.push_request(1.0, base_version=1, held_version=9, epoch=7))
        assert (other.receipt.reason, other.version, other.epoch) == (common.REASON_EPOCH, 1, 0)


@pytest.mark.parametrize("model", [TWO_SMALL, LARGE], ids=["small", "large"])
def test_under_one_mutex_a_reply_brings_one_state_of_the_whole_model(start_server, model):
    server = start_server("--protocol", "asgd:mutex=whole", "--staleness", "none")
    with crew(server, 2, model=model) as workers:
        num_shards = workers[0].plan.num_shards

        def train(worker: WireWorker) -> None:
            exchange = Exchange(worker)
            for _ in range(10):
                sequence = worker.push_request(0.0).sequence
                for shard_id in range(num_shards):
                    exchange.send(worker.push_request(1.0, shard_id, sequence=sequence, num_shards=num_shards))
                replies = [next(exchange.replies) for _ in range(num_shards)]
                assert [reply.receipt.shard_id for reply in replies] == list(range(num_shards))
                assert len({reply.version for reply in replies}) == 1
                assert len({value for reply in replies for value in values_of(reply)}) == 1
            assert exchange.end() == []

        at_once([lambda: train(workers[0]), lambda: train(workers[1])])
        assert {shard.version for shard in workers[0].pull()} == {20}
    assert memory_in_flight(server) == 0


def test_a_push_that_began_part_by_part_ends_so_when_one_mutex_comes_into_force(start_server):
    server = start_server("--staleness", "none")
    with WireWorker(server.data, model=TWO_SMALL) as worker:
        worker.join()
        exchange = Exchange(worker)
        first, second = (worker.push_request(1.0, i, sequence=1, num_shards=2) for i in (0, 1))
        assert exchange.ask(first).receipt.version_after == 1
        configure(server, protocol="asgd")
        assert exchange.ask(second).receipt.version_after == 1
        exchange.send(worker.push_request(1.0, 0, 1, sequence=2, num_shards=2))
        last = exchange.ask(worker.push_request(1.0, 1, 1, sequence=2, num_shards=2))
        assert [last.receipt.version_after, next(exchange.replies).receipt.version_after] == [2, 2]


def test_a_push_during_which_one_mutex_goes_and_comes_back_goes_on_part_by_part(start_server):
    model = Model((Tensor("x", (48,)),), shard_size=16)
    server = start_server("--staleness", "none", "--protocol", "asgd:mutex=whole")
    with WireWorker(server.data, model=model) as worker:
        worker.join()
        exchange = Exchange(worker)
        parts = [worker.push_request(1.0, i, sequence=1, num_shards=3) for i in range(3)]
        exchange.send(parts[0])
        wait_until(lambda: memory_in_flight(server) > 0, 20, "the first part's arrival")
        configure(server, protocol="asgd:mutex=shard")
        exchange.send(parts[1])
        assert [next(exchange.replies).receipt.version_after for _ in range(2)] == [1, 1]
        configure(server, protocol="asgd:mutex=whole")
        assert exchange.ask(parts[2]).receipt.version_after == 1


def test_asgd_under_one_mutex_refuses_a_second_server_by_name(start_server):
    server = start_server("--protocol", "asgd:mutex=whole")
    with WireWorker(server.data, num_servers=2, server_index=1) as worker:
        for call in (worker.hello, lambda: worker.initialize(1)):
            status, name, text = refusal_of(call)
            assert (status, name) == ("INVALID_ARGUMENT", "InvalidArgument")
            for word in ("asgd", "mutex", "2", "one server", "mutex=shard"):
                assert word in text


def test_a_push_that_ends_before_it_is_whole_changes_nothing(start_server):
    server = start_server("--protocol", "asgd:mutex=whole")
    with crew(server, 1, model=TWO_SMALL) as [worker]:
        half, other = (worker.push_request(1.0, shard_id, sequence=7, num_shards=2) for shard_id in (0, 1))
        status, name, text = refusal_of(worker.push, half)
        assert (status, name) == ("INVALID_ARGUMENT", "InvalidArgument")
        assert "push 7 of worker 'w0' ended after 1 of its 2 messages, and nothing of it was applied" in text
        assert refusal_of(worker.push, half, worker.push_request(1.0, sequence=8, num_shards=2))[1] == "InvalidArgument"
        assert {shard.version for shard in worker.pull()} == {0}
        assert [receipt.version_after for receipt in worker.push(half, other)] == [1, 1]
        # After a loss, a client sends those without a receipt again, and says how many they are.
        other.num_shards = 1
        [again] = worker.push(other)
        assert (again.duplicate, again.version_after) == (True, 1)


def test_a_push_that_says_no_number_of_shards_is_whole_when_its_stream_ends(start_server):
    server = start_server("--protocol", "asgd:mutex=whole", "--staleness", "none")
    with crew(server, 1, model=TWO_SMALL) as [worker]:
        first, second = worker.push_request(1.0, 0), worker.push_request(1.0, 1)
        second.sequence = first.sequence
        assert [receipt.shard_id for receipt in worker.push(first, second)] == [0, 1]
        replies = list(worker.stub.Exchange(iter([worker.push_request(1.0, 0, 1)]), timeout=20))
        assert [(reply.receipt.shard_id, reply.version) for reply in replies] == [(0, 2)]


def test_a_push_of_parts_that_cannot_become_one_is_refused(start_server):
    """Its memory would be held for what never comes."""
    server = start_server("--protocol", "asgd:mutex=whole")
    with WireWorker(server.data, model=TWO_SMALL) as worker:
        worker.join()
        parts = [worker.push_request(1.0, 0) for _ in range(2)]
        for num_shards, text in ((3, "num_shards 3, and this server holds 2"), (2, "holds shard 0 twice")):
            for part in parts:
                part.num_shards, part.sequence = num_shards, 7
            status, name, message = refusal_of(worker.push, *parts)
            assert (status, name) == ("INVALID_ARGUMENT", "InvalidArgument")
            assert text in message


def test_nothing_is_held_of_a_push_whose_sender_has_not_joined(start_server):
    """Each invented name would have the first part of a push held for as long as its rest may take."""
    server = start_server("--protocol", "asgd:mutex=whole")
    with crew(server, 1, model=TWO_SMALL) as [worker]:
        for field, value, name in (
            ("worker_id", "nobody", "UnknownWorker"),
            ("run_id", "another", "RunMismatch"),
            ("incarnation", worker.sender.incarnation - 1, "Superseded"),
        ):
            exchange, part = Exchange(worker), worker.push_request(1.0, 0, num_shards=2)
            setattr(part.sender, field, value)
            exchange.send(part)
            assert refusal_of(next, exchange.replies)[1] == name
        exchange, parts = Exchange(worker), [worker.push_request(1.0, i, sequence=7, num_shards=2) for i in (0, 1)]
        exchange.send(parts[0])
        wait_until(lambda: memory_in_flight(server) > 0, 20, "the first part's arrival")
        parts[1].sender.worker_id = "nobody"
        exchange.send(parts[1])
        assert refusal_of(next, exchange.replies)[1] == "UnknownWorker"
        assert {shard.version for shard in worker.pull()} == {0}
    assert memory_in_flight(server) == 0
