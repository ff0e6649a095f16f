"""Who may call a real server: tokens on every port, and no open door by accident."""

from __future__ import annotations

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pyps_wire import inspector_pb2
from pyps_wire.errors import METADATA_KEY
from pyps_wire.inspector_pb2_grpc import InspectorStub
from support import ServerProcess
from wire_worker import CHANNEL_OPTIONS, WireWorker

TOKEN = "a-token-of-some-length"


@pytest.fixture
def guarded(start_server_process, tmp_path):
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN + "\n")
    return start_server_process("--token-file", str(token_file))


@pytest.mark.parametrize("token", [None, "wrong-token-of-length", TOKEN + "x", ""])
def test_calls_without_the_right_token_are_refused(guarded, token):
    with WireWorker(guarded.data, token=token) as worker:
        for call in (worker.hello, worker.pull, lambda: worker.push(worker.push_request(1.0))):
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert dict(caught.value.trailing_metadata())[METADATA_KEY] == "NotAuthenticated"
            assert "token" in caught.value.details()


def test_the_right_token_opens_both_ports(guarded):
    with WireWorker(guarded.data, token=TOKEN) as worker:
        worker.join()
        worker.push(worker.push_request(1.0))
        assert worker.pull()[0].version == 1
    with grpc.insecure_channel(guarded.control, options=CHANNEL_OPTIONS) as channel:
        stub = InspectorStub(channel)
        request = inspector_pb2.GetStatusRequest()
        assert stub.GetStatus(request, metadata=(("authorization", f"Bearer {TOKEN}"),), timeout=20).updates == 1
        with pytest.raises(grpc.RpcError) as caught:
            stub.GetStatus(request, timeout=20)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_health_needs_no_token(guarded):
    for address in (guarded.data, guarded.control):
        with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            reply = stub.Check(health_pb2.HealthCheckRequest(service="pyps.v1.ParameterServer"), timeout=20)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_beyond_loopback_a_server_wants_a_token():
    with ServerProcess("--host", "0.0.0.0", wait=False) as server:
        assert server.wait() == 2
        output = server.output()
        assert "--token-file" in output
        assert "--insecure" in output
        assert "Traceback" not in output


def test_insecure_in_plain_words_opens_the_server(start_server_process):
    server = start_server_process("--host", "0.0.0.0", "--insecure")
    assert "open to everybody" in server.output()
    with WireWorker(server.data.replace("0.0.0.0", "127.0.0.1")) as worker:
        assert worker.hello().initialize


@pytest.mark.parametrize(
    ("content", "word"), [("short", "8"), ("", "8"), ("two words and\nlines", "one line"), (None, "cannot be read")]
)
def test_a_token_file_that_cannot_serve_is_refused_at_the_start(tmp_path, content, word):
    token_file = tmp_path / "token"
    if content is not None:
        token_file.write_text(content)
    with ServerProcess("--token-file", str(token_file), wait=False) as server:
        assert server.wait() == 2
        assert word in server.output()
        assert "Traceback" not in server.output()
