"""Bad input on a real server: one clear sentence each, and the state unchanged."""

import gc
import threading
import tracemalloc
from functools import partial
from pathlib import Path

import grpc
import numpy as np
from google.protobuf.internal import encoder
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionResponse

from pyps.core.vectors.program import INSTRUCTIONS_MAX, LISTED_MAX
from pyps.service import calls
from pyps.service.convert import TENSORS_MAX
from pyps.service.parameter_server import SCALARS_MAX
from pyps.service.work_queue import LEASES_MAX
from pyps_wire import common_pb2 as common
from pyps_wire import framing
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire import vector_machine_pb2 as vectors
from pyps_wire import work_pb2 as work
from pyps_wire.codecs import ONEBIT, TOPK
from pyps_wire.contract import METHODS
from pyps_wire.partition import Model, Tensor
from support import connected, wait_until
from wire_worker import WireWorker, refusal_of, values_of

STREAMS_IN, STREAMS_OUT = ("Exchange", "Initialize", "Push", "Stage"), ("Exchange", "Pull", "Push")


def test_random_bytes_to_any_call_are_refused(start_server):
    server = start_server()
    with WireWorker(server.data) as worker:
        calls = ("Hello", "Heartbeat", "Leave", "Pull", "Push", "Exchange", "Initialize", "Attach", "Execute", "Stage")
        for method in calls:
            blob, path = b"\xff" * 100, METHODS[method]
            takes, gives = ("stream" if method in streams else "unary" for streams in (STREAMS_IN, STREAMS_OUT))
            call = getattr(worker.channel, f"{takes}_{gives}")(path)
            request = iter([blob]) if takes == "stream" else blob
            refused = refusal_of(lambda call=call, request=request: list(call(request, timeout=60)))
            assert refused[:2] == ("INVALID_ARGUMENT", "MalformedFrame"), method
            assert "100 bytes" in refused[2] and "\n" not in refused[2], method
    assert "Traceback" not in server.output()


def test_random_bytes_to_the_control_port_are_refused(start_server):
    server = start_server()
    with connected(server.control) as channel:
        for path in (
            "pyps.v1.Inspector/GetStatus",
            "grpc.health.v1.Health/Check",
            "grpc.channelz.v1.Channelz/GetServer",
        ):
            refused = refusal_of(channel.unary_unary(f"/{path}"), b"\xff" * 100, timeout=60)
            assert refused[:2] == ("INVALID_ARGUMENT", "MalformedFrame"), path
            assert "100 bytes" in refused[2]
        call = channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
        (answer,) = map(ServerReflectionResponse.FromString, call(iter([b"\xff" * 100]), timeout=60))
        assert answer.error_response.error_code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert "Traceback" not in server.output()


def test_push_and_pull_before_initialisation_say_what_comes_first(start_server):
    with WireWorker(start_server().data) as worker:
        worker.hello()
        for call in (worker.pull, lambda: worker.push(worker.push_request(1.0))):
            status, name, text = refusal_of(call)
            assert (status, name) == ("FAILED_PRECONDITION", "NotInitialized")
            assert "Initialize" in text


def test_lists_beyond_reason_are_refused_before_they_are_read(start_server):
    """A list of two million entries, of two bytes each, held up the event loop for seconds."""
    server, entries = start_server(), b"\x00" * 4_000_000
    with WireWorker(server.data) as worker:
        worker.join()
        for call, field in (("Pull", 4), ("Heartbeat", 4), ("Leave", 3), ("Proceed", 9)):
            crowd = entries.replace(b"\x00\x00", bytes([field << 3 | 2, 0]))
            kinds = worker.channel.unary_stream if call == "Pull" else worker.channel.unary_unary
            refused = refusal_of(
                lambda call=call, kinds=kinds, crowd=crowd: list(kinds(METHODS[call])(crowd, timeout=60))
            )
            assert refused[0] == "INVALID_ARGUMENT" and "4000000 bytes" in refused[2], call
        wants = [wire.PullRequest.Want(shard_id=0)] * 2
        assert "names 2 shards, and this server holds 1" in refusal_of(worker.pull, wants)[2]


def test_lists_longer_than_there_can_be_are_refused_by_their_length(start_server):
    with WireWorker(start_server().data) as worker:
        worker.join()
        hello, entries = wire.HelloRequest(parts=range(TENSORS_MAX + 1)), [0] * (TENSORS_MAX + 1)
        model, groups = wire.HelloRequest(), wire.HelloRequest()
        for _ in entries:
            model.model.tensors.add()
            groups.optimizer.groups.add()
        opening = wire.InitializeRequest(model=model.model)
        crowd = vectors.Instruction(names=[""] * (LISTED_MAX + 1))
        leases = range(LEASES_MAX + 1)
        for method, request, words in (
            ("Hello", hello, f"lists {TENSORS_MAX + 1} parts"),
            ("Hello", model, f"lists {TENSORS_MAX + 1} tensors"),
            ("Hello", groups, f"lists {TENSORS_MAX + 1} groups"),
            ("Initialize", opening, f"lists {TENSORS_MAX + 1} tensors"),
            ("Execute", vectors.ExecuteRequest(instructions=[vectors.Instruction()] * (INSTRUCTIONS_MAX + 1)), "parts"),
            ("Execute", vectors.ExecuteRequest(instructions=[crowd]), f"{LISTED_MAX} names"),
            ("Deliver", work.DeliverRequest(sender=worker.sender, lease_ids=leases), f"names {LEASES_MAX + 1} leases"),
            ("Lease", work.LeaseRequest(sender=worker.sender, held=leases), f"names {LEASES_MAX + 1} leases"),
            ("BeginPass", work.BeginPassRequest(scalars={f"{i}": 0.0 for i in range(SCALARS_MAX + 1)}), "257 scalars"),
            ("Heartbeat", wire.HeartbeatRequest(scalars={f"{i}": 0.0 for i in range(SCALARS_MAX + 1)}), "257 scalars"),
        ):
            call = worker.channel.stream_stream(METHODS[method])
            messages = iter([request.SerializeToString()])
            status, name, text = refusal_of(lambda call=call, messages=messages: list(call(messages, timeout=60)))
            assert (status, name) == ("INVALID_ARGUMENT", "InvalidArgument") and words in text, (method, text)


def test_lists_of_millions_take_no_memory(start_server_process):
    """An empty tensor of two bytes takes two hundred once it is an object, and nothing else is done meanwhile."""
    server, million = start_server_process(), 2**20

    def field(number, content):
        return bytes([number << 3 | 2]) + encoder._VarintBytes(len(content)) + content

    with WireWorker(server.data) as worker:
        worker.join()
        before = peak_bytes(server)
        numbers = field(8, field(1, field(2, bytes(8 * million))))
        for method, crowd, words in (
            ("Hello", field(8, field(1, b"") * 4 * million), f"lists {4 * million} tensors"),
            ("Hello", field(8, field(1, b"")) * 3 * million, f"lists {3 * million} tensors"),
            ("Hello", field(3, b"") * 4 * million, f"has {4 * million} fields"),
            ("Hello", numbers, f"has {8 * million + 3} fields"),
            ("Hello", field(9, field(2, field(1, b"") * 4 * million)), f"lists {4 * million} hyperparameters"),
            ("Initialize", field(3, field(1, b"") * 4 * million), f"lists {4 * million} tensors"),
            ("Initialize", field(1, b"") * 4 * million, f"has {4 * million} fields"),
        ):
            call = worker.channel.stream_stream(METHODS[method])
            status, name, text = refusal_of(lambda call=call, crowd=crowd: list(call(iter([crowd]), timeout=60)))
            assert (status, name) == ("INVALID_ARGUMENT", "InvalidArgument") and words in text, (method, text)
        # gRPC has some copies of a message.
        assert peak_bytes(server) - before < 160 * 2**20
        worker.heartbeat()


def test_refused_messages_are_forgotten_with_their_calls(start_server):
    """The garbage collector comes to what gRPC leaves behind when it likes, by gigabytes later."""
    crowd = wire.HelloRequest(parts=range(TENSORS_MAX + 1)).SerializeToString()
    with WireWorker(start_server().data) as worker:
        gc.disable()
        tracemalloc.start()
        try:
            for method in ("Hello", "Pull", "Initialize", "Push"):
                call = worker.channel.stream_stream(METHODS[method])
                for _ in range(10):
                    refusal_of(lambda call=call: list(call(iter([crowd]), timeout=60)))
                # The last call may not have ended yet.
                wait_until(lambda: tracemalloc.get_traced_memory()[0] < 4 * len(crowd), what=method)
        finally:
            tracemalloc.stop()
            gc.enable()


def peak_bytes(server) -> int:
    [line] = [line for line in Path(f"/proc/{server.pid}/status").read_text().splitlines() if "VmHWM" in line]
    return int(line.split()[1]) * 1024


def test_a_port_takes_few_calls_at_once_and_short_questions(start_server, monkeypatch):
    monkeypatch.setattr(calls, "OPEN_READ_SECONDS", 60.0)
    server = start_server()
    ends = threading.Event()

    def never():
        ends.wait(60)
        yield b""

    # On two connections: one would have more calls than the server takes at once, and would refuse some for that.
    with connected(server.data) as data, connected(server.data) as other, connected(server.control) as control:
        silent = [
            connection.stream_stream("/grpc.health.v1.Health/Check")(never(), timeout=60)
            for connection in (data, other)
            for _ in range(20)
        ]
        refused = wait_until(lambda: len(d := [c for c in silent if c.done()]) == 40 - 16 and d, what="refusals")
        # The places are for those who have something to say.
        check = health_pb2_grpc.HealthStub(data).Check
        assert check(health_pb2.HealthCheckRequest(), timeout=60).status == health_pb2.HealthCheckResponse.SERVING
        assert all("more than 16 calls that need no token" in call.details() for call in refused)
        status = control.unary_unary("/pyps.v1.Inspector/GetStatus")
        code, _, text = refusal_of(status, b"x" * (64 * 2**10 + 1), timeout=60)
        assert code == "RESOURCE_EXHAUSTED" and "65537" in text
        ends.set()


def test_a_connection_takes_32_calls_at_once(start_server):
    ends = threading.Event()

    def never():
        ends.wait(60)
        yield b""

    with connected(start_server().data) as data:
        # Only then it knows how many calls at once the server takes on a connection, and lets the others wait.
        grpc.channel_ready_future(data).result(60)
        streams = [data.stream_stream(METHODS["Exchange"])(never(), timeout=60) for _ in range(32)]
        one_more = data.unary_unary(METHODS["Heartbeat"]).future(b"", timeout=60)
        assert not one_more.done()
        streams[0].cancel()
        assert one_more.result(60)
        ends.set()


def test_what_is_wrong_with_a_push_or_a_pull_is_said_and_nothing_is_applied(start_server):
    with WireWorker(start_server().data) as worker:
        worker.join(value=5.0)

        another, unknown = worker.push_request(1.0), worker.push_request(1.0)
        another.sender.run_id, unknown.shard_id = "other", 9
        # An empty extent is two bytes: tag 9 of wire type 2, length 0.
        crowd = worker.push_request(1.0).SerializeToString() + b"\x4a\x00" * 1_000_000
        for call, name, words in (
            (partial(worker.push, worker.push_request(np.ones(36, np.float32))), "WrongSize", ("144", "148")),
            (partial(worker.push, unknown), "InvalidArgument", ("shard 9", "shard 0")),
            (partial(worker.pull, [wire.PullRequest.Want(shard_id=9)]), "InvalidArgument", ("shard 9", "shard 0")),
            (partial(worker.push, another), "RunMismatch", ("'other'",)),
            (
                partial(worker.push, worker.push_request(1.0, codec=99)),
                "InvalidArgument",
                ("codec is 99", "float32 (1)"),
            ),
            (partial(worker.push_frames, [crowd]), "InvalidArgument", ("1000000 extents",)),
            (
                partial(worker.push, worker.push_request(1.0, example_count=2**64 - 1)),
                "InvalidArgument",
                ("example_count",),
            ),
        ):
            status, error, text = refusal_of(call)
            assert error == name and all(word in text for word in words), (error, text)
            assert status == ("FAILED_PRECONDITION" if name == "RunMismatch" else "INVALID_ARGUMENT"), text
        expected = "expected float32 (1), float16 (2), bfloat16 (3), int8 (4), int4 (5), delta (10)"
        for number, name in ((99, "99"), (TOPK, "topk"), (ONEBIT, "onebit")):
            push = worker.push_request(1.0, reply_codec=number)
            answers = [worker.stub.Exchange(iter([push]), timeout=60)]
            for role in (common.ROLE_WORKER, common.ROLE_OBSERVER):
                pull = wire.PullRequest(sender=worker.sender, role=role, codec=number)
                answers.append(worker.stub.Pull(pull, timeout=60))
            for replies in answers:
                assert f"the parameters' codec is {name}; {expected}" in refusal_of(list, replies)[2]
            assert f"parameter_codec is {name}; {expected}" in refusal_of(worker.hello, parameter_codec=number)[2]
        assert "gradient_codec is 99; expected float32 (1)" in refusal_of(worker.hello, gradient_codec=99)[2]
        assert [(shard.version, set(values_of(shard))) for shard in worker.pull()] == [(0, {5.0})]


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


def test_what_is_beyond_a_limit_is_refused_with_number_and_setting(start_server):
    for flag, limit, size, name in (
        ("--max-message-bytes", "100000", 30_000, "LimitExceeded"),
        ("--max-model-parameters", "36", 37, "LimitExceeded"),
        ("--max-in-flight-bytes", str(2**20), 262_144, "InvalidArgument"),
    ):
        with WireWorker(start_server(flag, limit).data, model=Model((Tensor("x", (size,)),))) as worker:
            status, error, text = refusal_of(worker.join)
        assert error == name, flag
        assert status == ("INVALID_ARGUMENT" if name == "InvalidArgument" else "RESOURCE_EXHAUSTED"), flag
        assert limit in text and flag in text


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


def test_a_refusal_too_long_for_grpc_arrives_shortened(start_server):
    server = start_server()
    wide = Model((Tensor("x" * 30_000, (3,)),))
    with WireWorker(server.data) as worker, WireWorker(server.data, "b", model=wide) as other:
        worker.join()
        status, name, text = refusal_of(other.hello)
    assert (status, name) == ("FAILED_PRECONDITION", "ModelMismatch")
    assert "shortened" in text


def test_names_that_people_could_not_read_are_refused(start_server):
    server = start_server()
    red = Model((Tensor("\x1b[31mred", (3,)),))
    with WireWorker(server.data, "good") as good, WireWorker(server.data, model=red) as third:
        status, _, text = refusal_of(third.hello)
        assert status == "INVALID_ARGUMENT" and "tensor" in text and text.isprintable()
        good.join()
        for name in ("a\nINFO all is well", "\x1b[31mred", "w" * 201):
            report = wire.HeartbeatRequest(sender=good.sender, scalars={name: 1.0})
            with WireWorker(server.data, name) as worker, WireWorker(server.data, run_id=name) as other:
                for call, what in (
                    (worker.hello, "worker_id"),
                    (partial(worker.initialize, 1), "worker_id"),
                    (other.hello, "run_id"),
                    (partial(other.initialize, 1), "run_id"),
                    (partial(good.stub.Heartbeat, report, timeout=60), "scalar"),
                ):
                    status, kind, text = refusal_of(call)
                    assert (status, kind) == ("INVALID_ARGUMENT", "InvalidArgument"), (name, what)
                    assert what in text and text.isprintable()
