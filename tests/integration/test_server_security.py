"""Who may call a real server: tokens on every port, and no open door by accident."""

import contextlib
import socket
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pyps.config import ConfigError
from pyps.service import calls, health, hosting
from pyps_wire import inspector_pb2
from pyps_wire.contract import INSPECTOR, stub_of
from support import connected, wait_until
from wire_worker import CHANNEL_OPTIONS, WireWorker, refusal_of

TOKEN = "a-token-of-some-length"


@pytest.fixture
def guarded(start_server, tmp_path):
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN + "\n", encoding="utf-8")
    return start_server("--token-file", str(token_file))


def test_calls_without_the_right_token_are_refused(guarded):
    for token in (None, "wrong-token-of-length", TOKEN + "x", ""):
        with WireWorker(guarded.data, token=token) as worker:
            for call in (worker.hello, worker.pull, lambda worker=worker: worker.push(worker.push_request(1.0))):
                status, name, text = refusal_of(call)
                assert (status, name) == ("UNAUTHENTICATED", "NotAuthenticated"), token
                assert "token" in text


def test_callers_without_a_token_who_send_no_message_are_refused_and_delay_nobody(guarded):
    """A thread a caller would leave none for health checks; a message taken in first would cost memory."""
    ends = threading.Event()
    with contextlib.ExitStack() as stack:
        channels = [
            stack.enter_context(grpc.insecure_channel(address, options=CHANNEL_OPTIONS))
            for address in (guarded.data, guarded.control)
        ]
        stack.callback(ends.set)
        data, control = channels
        # Health needs no token: such a call waits for its message.
        silent = [
            control.stream_unary("/grpc.health.v1.Health/Check").future(_never(ends), timeout=60) for _ in range(20)
        ]
        refused = [
            *(control.stream_unary("/pyps.v1.Inspector/GetStatus").future(_never(ends), timeout=60) for _ in range(10)),
            *(data.stream_unary("/pyps.v1.ParameterServer/Hello").future(_never(ends), timeout=60) for _ in range(10)),
        ]
        assert {call.code() for call in refused} == {grpc.StatusCode.UNAUTHENTICATED}
        reply = health_pb2_grpc.HealthStub(control).Check(health_pb2.HealthCheckRequest(), timeout=20)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        metadata = (("authorization", f"Bearer {TOKEN}"),)
        assert stub_of(INSPECTOR, control).GetStatus(inspector_pb2.GetStatusRequest(), metadata=metadata, timeout=20)
        assert not any(call.done() for call in silent)


def _never(ends):
    """The messages of a caller who begins a call and then says nothing."""
    ends.wait(60)
    yield from ()


def test_a_message_that_does_not_come_ends_its_call(guarded, monkeypatch):
    ends = threading.Event()
    monkeypatch.setattr(calls, "READ_SECONDS", 0.05)
    with grpc.insecure_channel(guarded.data, options=CHANNEL_OPTIONS) as channel:
        hello = channel.stream_unary("/pyps.v1.ParameterServer/Hello")
        for messages, status, words in (
            (_never(ends), "DEADLINE_EXCEEDED", "did not come within 0.05 s"),
            (iter(()), "INVALID_ARGUMENT", "without its message"),
        ):
            metadata = (("authorization", f"Bearer {TOKEN}"),)
            refused = refusal_of(hello, messages, metadata=metadata, timeout=60)
            assert refused[0] == status and words in refused[2]
        ends.set()


def test_watches_of_health_are_few_and_end(start_server, monkeypatch):
    monkeypatch.setattr(health, "WATCHES_MAX", 2)
    with connected(start_server().control) as channel:
        stub, serving = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckResponse.SERVING
        [unknown] = stub.Watch(health_pb2.HealthCheckRequest(service="none"), timeout=20)
        assert unknown.status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        watches = [stub.Watch(health_pb2.HealthCheckRequest(), timeout=20) for _ in range(2)]
        assert [next(watch).status for watch in watches] == [serving] * 2
        one_more = stub.Watch(health_pb2.HealthCheckRequest(), timeout=20)
        assert refusal_of(next, one_more)[:2] == ("RESOURCE_EXHAUSTED", "LimitExceeded")
        for watch in watches:
            watch.cancel()
        monkeypatch.setattr(health, "WATCH_SECONDS", 0.1)

        def watched() -> list[health_pb2.HealthCheckResponse]:
            with contextlib.suppress(grpc.RpcError):
                return list(stub.Watch(health_pb2.HealthCheckRequest(), timeout=20))
            return []

        assert [reply.status for reply in wait_until(watched, what="a place")] == [serving]


def answers(server) -> bool:
    """Return whether the control port answers to a new caller."""
    with connected(server.control) as channel, contextlib.suppress(grpc.RpcError):
        stub_of(INSPECTOR, channel).GetStatus(inspector_pb2.GetStatusRequest(), timeout=2)
        return True
    return False


PREFACES = {"silence": b"", "an HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"}


@pytest.mark.parametrize("said", PREFACES)
def test_connections_without_a_call_leave_their_places_to_others(start_server, monkeypatch, said):
    monkeypatch.setattr(hosting, "_HANDSHAKE_MS", 300)
    monkeypatch.setattr(hosting, "_IDLE_MS", 300)
    monkeypatch.setattr(hosting, "_CONTROL_CONNECTIONS_MAX", 8)
    server = start_server()
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            idle = stack.enter_context(socket.create_connection(server.control.rsplit(":", 1), timeout=20))
            idle.sendall(PREFACES[said])

        wait_until(lambda: answers(server), what="a place")


@pytest.mark.parametrize("said", PREFACES)
def test_the_oldest_connections_without_a_call_end_for_newcomers(start_server, monkeypatch, said):
    # None of them ends by itself while this test lasts.
    for name in ("_HANDSHAKE_MS", "_IDLE_MS", "_DATA_IDLE_MS"):
        monkeypatch.setattr(hosting, name, 600_000)
    monkeypatch.setattr(hosting, "_CONTROL_CONNECTIONS_MAX", 40)
    monkeypatch.setattr(hosting, "_MORE_CONNECTIONS", 40)
    server = start_server("--max-workers", "4")
    with contextlib.ExitStack() as stack:
        # A caller that was there before stays.
        earlier = [stack.enter_context(connected(address)) for address in (server.control, server.data)]
        ask = stub_of(INSPECTOR, earlier[0]).GetStatus
        ask(inspector_pb2.GetStatusRequest(), timeout=20)
        worker = stack.enter_context(WireWorker(server.data))
        worker.join(1.0)
        stubs = [health_pb2_grpc.HealthStub(channel) for channel in (earlier[0], worker.channel)]
        watches = [stub.Watch(health_pb2.HealthCheckRequest(), timeout=60) for stub in stubs]
        for watch in watches:
            next(watch)
        for address in (server.control, server.data):
            for _ in range(100):
                idle = stack.enter_context(socket.create_connection(address.rsplit(":", 1), timeout=20))
                with contextlib.suppress(ConnectionError):
                    idle.sendall(PREFACES[said])

        def joined() -> bool:
            with contextlib.suppress(grpc.RpcError), WireWorker(server.data, "late") as late:
                late.hello()
                return True
            return False

        wait_until(lambda: answers(server), what="a place at the control port")
        wait_until(joined, what="a place at the data port")
        ask(inspector_pb2.GetStatusRequest(), timeout=20)
        worker.push(worker.push_request(1.0))
        # A call in a new connection would go through too.
        assert all(watch.is_active() for watch in watches)
    server.wait_for_output("connections that made no call were ended for others")


def test_beyond_loopback_a_server_requires_tls_and_a_token_or_insecure(start_server, tmp_path, capsys):
    (tmp_path / "token").write_text(TOKEN, encoding="utf-8")
    token = ("--token-file", str(tmp_path / "token"))
    for flags, missing in (((), "without a token"), (token, "in the clear without TLS")):
        with pytest.raises(ConfigError, match=rf"{missing}: give --token-file.*--tls-cert.*--insecure"):
            start_server("--host", "0.0.0.0", *flags)
    server = start_server("--host", "0.0.0.0", "--insecure")
    assert "open to everybody" in capsys.readouterr().out
    with WireWorker(server.data.replace("0.0.0.0", "127.0.0.1")) as worker:
        assert worker.hello().initialize


def test_a_token_file_that_cannot_serve_is_refused_at_the_start(start_server, tmp_path):
    contents = (("short", "8"), ("", "8"), ("a-token-of-some-length\nlines", "8"), (None, "cannot be read"))
    for index, (content, words) in enumerate(contents):
        token_file = tmp_path / f"token-{index}"
        if content is not None:
            token_file.write_text(content, encoding="utf-8")
        with pytest.raises(ConfigError, match=words):
            start_server("--token-file", str(token_file))
