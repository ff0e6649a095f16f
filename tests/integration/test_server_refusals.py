"""Bad input on a real server: one clear sentence each, and the state unchanged."""

from __future__ import annotations

import random

import numpy as np

from pyps_wire import common_pb2 as common
from pyps_wire import framing
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.contract import METHODS
from pyps_wire.partition import Model, Tensor
from wire_worker import WireWorker, refusal_of, values_of

STREAMS_IN, STREAMS_OUT = ("Exchange", "Initialize"), ("Exchange", "Pull")


def test_random_bytes_to_push_are_refused_in_one_sentence(start_server):
    server = start_server()
    with WireWorker(server.data) as worker:
        worker.join(value=5.0)
        for seed in range(20):
            blob = random.Random(seed).randbytes(100)
            status, name, text = refusal_of(worker.push_frames, [blob])
            # A few blobs are valid messages by chance; then it is their sense that is refused.
            assert status in ("INVALID_ARGUMENT", "FAILED_PRECONDITION"), (seed, text)
            assert name
            assert "\n" not in text
        status, name, text = refusal_of(worker.push_frames, [b"\xff" * 100])
        assert (status, name) == ("INVALID_ARGUMENT", "MalformedFrame")
        assert "100 bytes" in text
        assert set(values_of(worker.pull()[0])) == {5.0}
    assert "Traceback" not in server.output()


def test_random_bytes_to_any_call_are_refused(start_server):
    with WireWorker(start_server().data) as worker:
        for method in ("Hello", "Heartbeat", "Leave", "Pull", "Exchange", "Initialize"):
            blob, path = b"\xff" * 100, METHODS[method]
            takes, gives = ("stream" if method in streams else "unary" for streams in (STREAMS_IN, STREAMS_OUT))
            call = getattr(worker.channel, f"{takes}_{gives}")(path)
            request = iter([blob]) if takes == "stream" else blob
            refused = refusal_of(lambda call=call, request=request: list(call(request, timeout=60)))
            assert refused[:2] == ("INVALID_ARGUMENT", "MalformedFrame"), method


def test_push_and_pull_before_initialisation_say_what_comes_first(start_server):
    with WireWorker(start_server().data) as worker:
        worker.hello()
        for call in (worker.pull, lambda: worker.push(worker.push_request(1.0))):
            status, name, text = refusal_of(call)
            assert (status, name) == ("FAILED_PRECONDITION", "NotInitialized")
            assert "Initialize" in text


def test_a_gradient_with_nan_is_rejected_by_worker_name_and_the_stream_goes_on(start_server):
    with WireWorker(start_server().data, "worker-7") as worker:
        worker.join(value=5.0)
        gradient = np.ones(37, np.float32)
        gradient[-1] = np.nan
        bad, good = worker.push_request(gradient), worker.push_request(1.0)
        first, second = worker.push(bad, good)
        assert (first.outcome, first.reason) == (common.OUTCOME_REJECTED, common.REASON_NOT_FINITE)
        assert "'worker-7'" in first.message
        assert (first.version_before, first.version_after) == (0, 0)
        assert second.version_after == 1
        assert set(values_of(worker.pull()[0])) == {4.0}


def test_a_payload_of_the_wrong_size_is_refused_with_both_sizes(start_server):
    with WireWorker(start_server().data) as worker:
        worker.join(value=5.0)
        request = worker.push_request(np.ones(36, np.float32))
        status, name, text = refusal_of(worker.push, request)
        assert (status, name) == ("INVALID_ARGUMENT", "WrongSize")
        assert "144" in text
        assert "148" in text
        assert worker.pull()[0].version == 0


def test_an_unknown_shard_is_refused_with_those_that_are_here(start_server):
    with WireWorker(start_server().data) as worker:
        worker.join()
        request = worker.push_request(1.0)
        request.shard_id = 9
        status, _, text = refusal_of(worker.push, request)
        assert status == "INVALID_ARGUMENT"
        assert "shard 9" in text
        assert "shard 0" in text
        status, _, _ = refusal_of(worker.pull, [wire.PullRequest.Want(shard_id=9)])
        assert status == "INVALID_ARGUMENT"


def test_a_push_of_another_run_is_refused(start_server):
    with WireWorker(start_server().data) as worker:
        worker.join()
        request = worker.push_request(1.0)
        request.sender.run_id = "other"
        status, name, text = refusal_of(worker.push, request)
        assert (status, name) == ("FAILED_PRECONDITION", "RunMismatch")
        assert "'other'" in text


def test_an_unknown_codec_is_refused_by_push_and_pull(start_server):
    with WireWorker(start_server().data) as worker:
        worker.join()
        request = worker.push_request(1.0)
        request.codec = 9
        status, _, text = refusal_of(worker.push, request)
        assert status == "INVALID_ARGUMENT"
        assert "float32" in text.lower()
        pull = wire.PullRequest(sender=worker.sender, codec=9)
        status, _, text = refusal_of(lambda: list(worker.stub.Pull(pull, timeout=20)))
        assert status == "INVALID_ARGUMENT"
        assert "bfloat16" in text


def test_a_truncated_stream_keeps_what_was_answered_and_nothing_else(start_server):
    with WireWorker(start_server().data) as worker:
        worker.join()
        request = worker.push_request(1.0)
        payload, header = request.payload, wire.PushRequest.FromString(request.SerializeToString())
        header.ClearField("payload")
        whole = framing.join(header, payload)
        status, _, text = refusal_of(worker.push_frames, [whole, whole[:-20]])
        assert status == "INVALID_ARGUMENT", text
        assert worker.pull()[0].version == 1
        assert worker.push(request)[0].duplicate


def test_a_message_beyond_the_limit_is_refused_with_number_and_setting(start_server):
    server = start_server("--max-message-bytes", "100000")
    with WireWorker(server.data, model=Model((Tensor("x", (30_000,)),))) as worker:
        status, name, text = refusal_of(worker.join)
        assert (status, name) == ("RESOURCE_EXHAUSTED", "LimitExceeded")
        assert "100000" in text
        assert "--max-message-bytes" in text


def test_a_model_beyond_the_limit_is_refused_with_number_and_setting(start_server):
    with WireWorker(start_server("--max-model-parameters", "36").data) as worker:
        status, name, text = refusal_of(worker.hello)
        assert (status, name) == ("RESOURCE_EXHAUSTED", "LimitExceeded")
        for word in ("37", "36", "--max-model-parameters"):
            assert word in text


def test_one_worker_too_many_is_refused_with_number_and_setting(start_server):
    server = start_server("--max-workers", "1")
    with WireWorker(server.data, "a") as first, WireWorker(server.data, "b") as second:
        first.join()
        status, name, text = refusal_of(second.hello)
        assert (status, name) == ("RESOURCE_EXHAUSTED", "LimitExceeded")
        assert "limit is 1" in text
        assert "--max-workers" in text
        first.leave()
        assert second.hello().state == common.RUN_STATE_READY


def test_bytes_in_flight_beyond_the_budget_are_refused_with_number_and_setting(start_server):
    server = start_server("--max-in-flight-bytes", str(2**20))
    model = Model((Tensor("x", (262_144,)),))
    with WireWorker(server.data, model=model) as worker:
        status, name, text = refusal_of(worker.join)
        assert (status, name) == ("INVALID_ARGUMENT", "BadRequest")
        assert "1048576" in text
        assert "--max-in-flight-bytes" in text


def test_a_refusal_too_long_for_grpc_arrives_shortened(start_server):
    server = start_server()
    wide = Model((Tensor("x" * 30_000, (3,)),))
    with WireWorker(server.data) as worker, WireWorker(server.data, "b", model=wide) as other:
        worker.join()
        status, name, text = refusal_of(other.hello)
    assert (status, name) == ("FAILED_PRECONDITION", "ModelMismatch")
    assert "cut" in text


def test_names_that_people_could_not_read_are_refused(start_server):
    server = start_server()
    for name in ("a\nINFO all is well", "\x1b[31mred", "w" * 201):
        with WireWorker(server.data, name) as worker, WireWorker(server.data, run_id=name) as other:
            for caller, what in ((worker, "worker_id"), (other, "run_id")):
                status, kind, text = refusal_of(caller.hello)
                assert (status, kind) == ("INVALID_ARGUMENT", "BadRequest"), name
                assert what in text and text.isprintable()
                status, _, text = refusal_of(caller.initialize, 1)
                assert status == "INVALID_ARGUMENT" and what in text, name


def test_a_million_extents_are_refused_before_they_are_read(start_server):
    server = start_server()
    with WireWorker(server.data) as worker:
        worker.join()
        # An empty extent is two bytes: tag 9 of wire type 2, length 0.
        frame = worker.push_request(1.0).SerializeToString() + b"\x4a\x00" * 1_000_000
        status, name, text = refusal_of(worker.push_frames, [frame])
    assert (status, name) == ("INVALID_ARGUMENT", "BadRequest")
    assert "1000000 extents" in text


def test_a_count_of_examples_that_would_not_add_up_is_refused(start_server):
    server = start_server()
    with WireWorker(server.data) as worker:
        worker.join()
        status, name, text = refusal_of(worker.push, worker.push_request(1.0, example_count=2**64 - 1))
        assert (status, name) == ("INVALID_ARGUMENT", "BadRequest")
        assert "example_count" in text
        assert worker.pull()[0].version == 0
