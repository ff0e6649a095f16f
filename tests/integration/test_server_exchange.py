"""Exchange on a real server: pushes answered with the parameters after them, in one stream."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import numpy as np
import pytest

from inspection import inspect
from pyps_wire import codecs, framing
from pyps_wire import common_pb2 as common
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.contract import METHODS
from pyps_wire.inspector_pb2 import ConfigureRequest
from pyps_wire.partition import Model, Tensor
from support import wait_until
from wire_worker import WireWorker, at_once, crew, refusal_of, sgd, status_of, values_of

# Four shards of a megabyte each: their work is done on threads.
LARGE = Model((Tensor("x", (1_048_576,)),), shard_size=262_144)
TWO_SMALL = Model((Tensor("x", (32,)),), shard_size=16)
HARDSYNC = ("--protocol", "hardsync", "--staleness", "none")


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
        """The replies that are still to come."""
        self._requests.put(None)
        return list(self.replies)


def memory_in_flight(server) -> int:
    """Bytes of pushes and pulls that the server holds."""
    return int(inspect(server.control, "GetMemory").in_flight_bytes)


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


def test_pushes_to_one_large_shard_keep_their_order_while_they_run_on_threads(start_server):
    with WireWorker(start_server().data, model=LARGE) as worker:
        worker.join()
        requests = [worker.push_request(1.0, 2, base_version=step) for step in range(8)]
        replies = list(worker.stub.Exchange(iter(requests), timeout=40))
        assert [reply.version for reply in replies] == list(range(1, 9))
        assert [values_of(reply)[-1] for reply in replies] == [-float(step) for step in range(1, 9)]


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
        assert status_of(server).pushes_applied < 40 + 32
        assert memory_in_flight(server) < 3 * 2 * 2**20 + 2**16
        # Once it listens all are answered, in order.
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
        # The next stream is as good as the first.
        assert [reply.version for reply in worker.stub.Exchange(iter([worker.push_request(1.0, 1)]), timeout=20)] == [1]
    assert memory_in_flight(server) == 0
    assert "Traceback" not in server.output()


def test_a_message_that_cannot_be_read_ends_the_stream_after_what_is_under_way(start_server):
    server = start_server()
    with WireWorker(server.data, model=LARGE) as worker:
        worker.join()
        frames = [*(worker.push_request(1.0, shard_id).SerializeToString() for shard_id in (0, 1)), b"\xff" * 50]
        call = worker.channel.stream_stream(METHODS["Exchange"])(iter(frames), timeout=20)
        assert [wire.ExchangeReply.FromString(next(call)).version for _ in range(2)] == [1, 1]
        assert refusal_of(next, call)[:2] == ("INVALID_ARGUMENT", "MalformedFrame")


def test_parameters_come_in_the_codec_that_was_asked_for_bit_for_bit(start_server):
    for length in (37, 70_001):
        for codec in (common.CODEC_FLOAT32, common.CODEC_FLOAT16, common.CODEC_BFLOAT16):
            model = Model((Tensor("x", (length,)),))
            with WireWorker(start_server().data, model=model, optimizer=sgd(0.1)) as worker:
                worker.join(value=1.0)
                gradient = np.random.default_rng(7).normal(0, 100, length).astype(np.float32)
                [reply] = worker.stub.Exchange(iter([worker.push_request(gradient, reply_codec=codec)]), timeout=60)
                [shard] = worker.pull()
            parameters, case = values_of(shard), f"{length} in codec {codec}"
            np.testing.assert_array_equal(parameters, np.float32(1.0) - np.float32(0.1) * gradient, err_msg=case)
            assert (reply.codec, reply.version) == (codec, 1), case
            assert reply.payload == bytes(rounded(parameters, codec)) == bytes(codecs.encode(parameters, codec)), case


def rounded(values: np.ndarray, codec: int) -> bytes:
    """The numbers to nearest, ties to even, by numpy and by the definition."""
    if codec == common.CODEC_FLOAT32:
        return values.tobytes()
    if codec == common.CODEC_FLOAT16:
        return values.astype(np.float16).tobytes()
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).tobytes()


def test_an_unknown_codec_is_refused_before_the_push_is_applied(start_server):
    with WireWorker(start_server().data) as worker:
        worker.join()
        status, name, text = refusal_of(list, worker.stub.Exchange(iter([worker.push_request(1.0, reply_codec=9)])))
        assert (status, name, text) == (
            "INVALID_ARGUMENT",
            "BadRequest",
            "codec 9 is unknown; this server writes float32, float16, bfloat16",
        )
        assert worker.pull()[0].version == 0


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
        # Whoever does not say what he holds always gets it, and so does who holds versions of another epoch.
        assert exchange.ask(worker.push_request(float("nan"), base_version=1)).version == 1
        other = exchange.ask(worker.push_request(1.0, base_version=1, held_version=9, epoch=7))
        assert (other.receipt.reason, other.version, other.epoch) == (common.REASON_EPOCH, 1, 0)


def test_a_duplicate_gets_its_first_receipt_and_the_newest_parameters(start_server):
    with WireWorker(start_server().data) as worker:
        worker.join(value=5.0)
        exchange, request = Exchange(worker), worker.push_request(1.0, held_version=0)
        first = exchange.ask(request)
        exchange.ask(worker.push_request(1.0, base_version=1))
        again = exchange.ask(request)
        assert (again.receipt.duplicate, again.receipt.version_after, again.version) == (True, 1, 2)
        assert set(values_of(again)) == {3.0}
        again.receipt.duplicate = False
        assert again.receipt == first.receipt


def test_who_waits_for_a_round_gets_no_parameters_and_who_completes_it_does(start_server):
    server = start_server(*HARDSYNC, "--expected-workers", "2")
    with crew(server, 2) as [early, late]:
        [pending] = early.stub.Exchange(iter([early.push_request(1.0)]), timeout=20)
        assert (pending.receipt.outcome, pending.receipt.min_version) == (common.OUTCOME_PENDING, 1)
        assert (pending.codec, pending.version, pending.payload) == (common.CODEC_UNSPECIFIED, 0, b"")
        [completed] = late.stub.Exchange(iter([late.push_request(3.0)]), timeout=20)
        assert (completed.receipt.outcome, completed.version) == (common.OUTCOME_APPLIED, 1)
        assert set(values_of(completed)) == {-2.0}
        want = wire.PullRequest.Want(shard_id=0, held_version=0, min_version=1)
        assert [set(values_of(shard)) for shard in early.pull([want], wait_seconds=20)] == [{-2.0}]


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
        inspect(server.control, "Configure", ConfigureRequest(protocol="asgd"))
        assert exchange.ask(second).receipt.version_after == 1
        # The next is held until it is all there.
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
        inspect(server.control, "Configure", ConfigureRequest(protocol="asgd:mutex=shard"))
        exchange.send(parts[1])
        assert [next(exchange.replies).receipt.version_after for _ in range(2)] == [1, 1]
        inspect(server.control, "Configure", ConfigureRequest(protocol="asgd:mutex=whole"))
        assert exchange.ask(parts[2]).receipt.version_after == 1


def test_parameters_that_come_along_are_counted_as_a_pull(start_server):
    server = start_server()
    with WireWorker(server.data) as worker:
        worker.join()
        exchange = Exchange(worker)
        exchange.ask(worker.push_request(1.0, held_version=0))
        exchange.ask(worker.push_request(float("nan"), base_version=1, held_version=1))
        assert status_of(server).bytes_out == 37 * 4


def test_a_reply_is_what_the_generated_class_would_have_written(start_server):
    with WireWorker(start_server().data, model=TWO_SMALL) as worker:
        worker.join(value=1.0)
        requests = [worker.push_request(0.5, shard_id, reply_codec=common.CODEC_BFLOAT16) for shard_id in (0, 1)]
        # One as the generated class writes it, one framed by hand.
        framed = wire.PushRequest.FromString(requests[1].SerializeToString())
        framed.ClearField("payload")
        messages = [requests[0].SerializeToString(), framing.join(framed, requests[1].payload)]
        call = worker.channel.stream_stream(METHODS["Exchange"])(iter(messages), timeout=20)
        for shard_id, raw in enumerate(call):
            reply = wire.ExchangeReply.FromString(raw)
            assert (reply.receipt.shard_id, reply.version, len(reply.payload)) == (shard_id, 1, 32)
            assert reply.SerializeToString(deterministic=True) == raw
            header, payload = framing.split(raw)
            assert framing.join(header, payload) == raw


def test_a_stream_that_stays_open_ends_with_the_server(start_server):
    server = start_server("--drain-seconds", "5")
    with WireWorker(server.data) as worker:
        worker.join()
        exchange = Exchange(worker)
        assert exchange.ask(worker.push_request(1.0)).version == 1
        assert server.stop() == 0
        assert refusal_of(next, exchange.replies)[0] in ("UNAVAILABLE", "CANCELLED")
    assert "Traceback" not in server.output()
