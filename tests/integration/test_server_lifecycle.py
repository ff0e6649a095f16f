"""How a real server starts, is stopped, finishes its run and goes on from a checkpoint."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import time
import urllib.request

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pyps_wire import common_pb2 as common
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.partition import Model, Tensor
from support import PythonProcess, ServerProcess, wait_until
from wire_worker import CHANNEL_OPTIONS, WireWorker, values_of

Command = wire.HeartbeatReply.Command


def test_the_start_block_says_what_runs(start_server_process):
    output = start_server_process("--run-id", "night", "--optimizer", "sgd:learning_rate=0.5").output()
    for word in ("pyps 0.1.0", "avx2", "127.0.0.1:", "night", "sgd:learning_rate=0.5", "async", "divide", "MiB"):
        assert word.replace("avx2", "kernels") in output
    assert "open until a worker initialises the run" in output


def test_the_ready_file_names_addresses_process_and_run(start_server_process):
    server = start_server_process("--run-id", "night")
    assert server.ready == {
        "data": server.data,
        "control": server.control,
        "metrics": server.metrics,
        "pid": server.pid,
        "run_id": "night",
    }
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=20) as page:
        assert b"pyps_" in page.read()


def test_a_ready_file_that_cannot_be_written_is_one_error(tmp_path):
    path = tmp_path / "missing" / "ready.json"
    with ServerProcess("--ready-file", str(path), wait=False) as server:
        assert server.wait() == 2
        assert f"pyps: the ready file {path} cannot be written: {path.parent} is no folder" in server.output()
        assert "Traceback" not in server.output()


@pytest.mark.parametrize("flag", ["--port", "--control-port", "--metrics-port"])
def test_a_busy_port_is_one_error_with_the_port_and_the_flag(flag):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as holder:
        port = holder.getsockname()[1]
        with ServerProcess(flag, str(port), wait=False) as server:
            assert server.wait() == 2
            [line] = server.output().splitlines()
            assert line.startswith("pyps:")
            assert f"port {port} " in line
            assert flag in line


def test_a_second_server_cannot_share_the_port(start_server_process):
    port = start_server_process().data.rpartition(":")[2]
    with ServerProcess("--port", port, wait=False) as second:
        assert second.wait() == 2
        assert f"port {port} " in second.output()


def test_kubernetes_variables_are_ignored_with_a_warning(start_python, tmp_path):
    settings, ready = tmp_path / "pyps.toml", tmp_path / "ready.json"
    settings.write_text("port = 0\ncontrol_port = 0\nmetrics_port = 0\n")
    variables = {
        "PYPS_PORT": "tcp://10.0.0.1:7610",
        "PYPS_PORT_7610_TCP_PORT": "7610",
        "PYPS_CONTROL_PORT": "tcp://10.0.0.2:7611",
        "PYPS_SERVICE_HOST": "10.0.0.1",
    }
    server = start_python("-m", "pyps", "serve", "--config", str(settings), "--ready-file", str(ready), env=variables)
    wait_until(lambda: ready.exists() or not server.running, 30, "the ready file")
    output = server.output()
    assert "PYPS_PORT=tcp://10.0.0.1:7610 is ignored" in output
    assert "PYPS_CONTROL_PORT=tcp://10.0.0.2:7611 is ignored" in output
    assert "10.0.0." not in json.loads(ready.read_text())["data"]
    assert server.terminate() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_with_0(start_server_process, number):
    server = start_server_process()
    with WireWorker(server.data) as worker:
        worker.join()
        began = time.monotonic()
        server.signal(number)
        assert server.wait(20) == 0
        assert time.monotonic() - began < 10
    assert "Traceback" not in server.output()


def test_sigterm_ends_parked_pulls_and_open_streams_with_unavailable(start_server_process):
    server = start_server_process()
    with WireWorker(server.data) as worker:
        worker.join()
        want = wire.PullRequest.Want(shard_id=0, held_version=0, min_version=1)
        request = wire.PullRequest(sender=worker.sender, wants=[want], wait_milliseconds=60_000)
        pull = worker.stub.Pull(request, timeout=70)
        assert worker.heartbeat().known
        server.signal(signal.SIGTERM)
        with pytest.raises(grpc.RpcError) as caught:
            list(pull)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert server.wait(20) == 0


def test_a_second_signal_ends_the_server_at_once(start_server_process):
    server = start_server_process("--drain-seconds", "100")
    model = Model((Tensor("x", (4_000_000,)),))
    with WireWorker(server.data, model=model) as worker:
        worker.join()
        # A pull that nobody reads holds up the drain.
        request = wire.PullRequest(sender=worker.sender)
        pull = worker.stub.Pull(request, timeout=100)
        assert next(pull).version == 0
        server.signal(signal.SIGTERM)
        server.wait_for_output("server ends")
        assert server.running
        server.signal(signal.SIGTERM)
        assert server.wait(20) == 128 + signal.SIGTERM
        pull.cancel()


def test_sigterm_saves_and_resume_goes_on_bit_for_bit(start_server_process, tmp_path):
    flags = ("--checkpoint-dir", str(tmp_path / "checkpoints"))
    first = start_server_process(*flags)
    with WireWorker(first.data) as worker:
        worker.join(value=5.0)
        request = worker.push_request(0.3)
        [receipt] = worker.push(request)
        before = worker.pull()[0].payload
        assert first.terminate() == 0
    second = start_server_process(*flags, "--resume")
    assert second.ready["run_id"] == "run-1"
    assert "open until" not in second.output()
    with WireWorker(second.data) as again:
        again.sender.CopyFrom(worker.sender)
        reply = again.hello()
        assert (reply.state, reply.epoch) == (common.RUN_STATE_READY, 1)
        [shard] = again.pull()
        assert (shard.version, shard.payload) == (1, before)
        # Applied before the restart: the original receipt, though it is of the old epoch.
        [duplicate] = again.push(request)
        assert duplicate.duplicate
        assert duplicate.version_after == receipt.version_after
        old = again.push_request(1.0, sequence=request.sequence + 1)
        old.epoch = 0
        assert again.push(old)[0].reason == common.REASON_EPOCH


def test_a_folder_with_checkpoints_is_not_mixed_with_a_new_run(start_server_process, tmp_path):
    flags = ("--checkpoint-dir", str(tmp_path / "checkpoints"))
    first = start_server_process(*flags)
    with WireWorker(first.data) as worker:
        worker.join()
        worker.push(worker.push_request(1.0))
    assert first.terminate() == 0
    with ServerProcess(*flags, wait=False) as second:
        assert second.wait() == 2
        assert "--resume" in second.output()
        assert "Traceback" not in second.output()
    with ServerProcess(*flags, "--resume", "--optimizer", "sgd:learning_rate=5", wait=False) as third:
        assert third.wait() == 2
        assert "the checkpoint's optimizer differs from --optimizer" in third.output()
        assert "learning_rate of group 0: 5 here, 1 there" in third.output()


def test_stop_after_updates_finishes_the_run_and_tells_the_workers(start_server_process, tmp_path):
    folder = tmp_path / "checkpoints"
    server = start_server_process("--stop-after", "updates=3", "--checkpoint-dir", str(folder))
    with WireWorker(server.data) as worker:
        worker.join(value=5.0)
        receipts = worker.push(*[worker.push_request(1.0, base_version=version) for version in range(5)])
        outcomes = [receipt.outcome for receipt in receipts]
        assert outcomes == [common.OUTCOME_APPLIED] * 3 + [common.OUTCOME_REJECTED] * 2
        assert receipts[3].reason == common.REASON_FINISHED
        pulse = worker.heartbeat()
        assert (pulse.command, pulse.state) == (Command.COMMAND_STOP, common.RUN_STATE_FINISHED)
        [shard] = worker.pull()
        assert shard.version == 3
        assert set(values_of(shard)) == {2.0}
        wait_until(lambda: list(folder.glob("checkpoint-*/manifest.json")), 20, "the checkpoint at the end")
        # A pull that waits for a version that will never come is answered with what there is.
        want = wire.PullRequest.Want(shard_id=0, held_version=2, min_version=9)
        assert worker.pull([want], wait_seconds=20)[0].version == 3


def test_stop_after_examples_and_seconds_finish_the_run(start_server_process):
    by_examples = start_server_process("--stop-after", "examples=64")
    with WireWorker(by_examples.data) as worker:
        worker.join()
        worker.push(worker.push_request(1.0, example_count=63))
        assert worker.heartbeat().command != Command.COMMAND_STOP
        worker.push(worker.push_request(1.0, base_version=1, example_count=1))
        assert worker.heartbeat().command == Command.COMMAND_STOP
    by_seconds = start_server_process("--stop-after", "seconds=0.2")
    with WireWorker(by_seconds.data) as worker:
        worker.join()
        wait_until(lambda: worker.heartbeat().command == Command.COMMAND_STOP, 20, "the stop")


def test_exit_when_done_waits_for_all_expected_workers(start_server_process):
    server = start_server_process("--exit-when-done", "--expected-workers", "2")
    with WireWorker(server.data, "a") as first, WireWorker(server.data, "b") as second:
        first.join()
        first.leave()
        second.join()
        assert server.running
        second.leave(wire.LeaveRequest.CAUSE_FAILED)
        assert server.wait(20) == 0
    assert "all workers are done" in server.output()


def test_exit_when_done_counts_a_worker_whose_lease_ran_out(start_server_process):
    server = start_server_process("--exit-when-done", "--heartbeat-seconds", "0.2", "--lease-seconds", "0.5")
    with WireWorker(server.data) as worker:
        worker.join()
        assert server.wait(20) == 0


def test_health_on_both_ports_tells_that_the_server_serves(start_server_process):
    server = start_server_process()
    for address in (server.data, server.control):
        with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            request = health_pb2.HealthCheckRequest(service="pyps.v1.ParameterServer")
            reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=20)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_json_logs_are_one_object_a_line(start_server_process):
    server = start_server_process("--log-format", "json")
    with WireWorker(server.data) as worker:
        worker.join()
    assert server.terminate() == 0
    events = [json.loads(line)["event"] for line in server.output().splitlines()]
    assert events[0] == "server started"
    assert "run ready" in events
    assert events[-1] == "server ended"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "x"], ["--port", "'x'", "whole number"]),
        (["--protocol", "nonsense"], ["--protocol", "nonsense", "async"]),
        (["--staleness", "nonsense"], ["--staleness", "nonsense", "divide"]),
        (["--optimizer", "lion"], ["--optimizer", "lion", "adagrad"]),
        (["--optimizer", "sgd:momentum=1"], ["--optimizer", "momentum", "learning_rate"]),
        (["--stop-after", "soon"], ["--stop-after", "'soon'", "updates=N"]),
        (["--resume"], ["--resume", "--checkpoint-dir"]),
        (["--config", "/nowhere.toml"], ["/nowhere.toml", "cannot be read"]),
        (["--host", "no.such.host.invalid", "--insecure"], ["no.such.host.invalid"]),
    ],
)
def test_a_bad_setting_is_one_sentence_without_a_traceback(flags, words):
    with PythonProcess("-m", "pyps", "serve", "--control-port", "0", "--metrics-port", "0", *flags) as process:
        assert process.wait() == 2
        [line] = [line for line in process.output().splitlines() if line.startswith("pyps:")]
        for word in words:
            assert word in line
        assert "Traceback" not in process.output()


def test_an_unknown_instruction_set_is_refused_at_the_start():
    with ServerProcess(env={"PYPS_ISA": "nonsense"}, wait=False) as server:
        assert server.wait() == 2
        assert "PYPS_ISA" in server.output()
        assert "Traceback" not in server.output()
