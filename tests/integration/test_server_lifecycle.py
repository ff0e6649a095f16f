"""How a real server starts, is stopped, finishes its run and goes on from a checkpoint."""

import contextlib
import json
import signal
import socket
import threading
import urllib.request

from client_support import Clock, make_client
from pyps_wire import common_pb2 as common
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.partition import Model, Tensor
from support import ServerProcess, inspect, wait_until
from wire_worker import UNREAD, WireWorker, parked_pull, refusal_of, unread_pull, values_of

Command = wire.HeartbeatReply.Command


def test_the_start_block_and_the_ready_file_say_what_runs(start_server_process):
    server = start_server_process("--run-id", "night", "--optimizer", "sgd:learning_rate=0.5", "--protocol", "ssp:s=2")
    block = ("pyps 0.1.0", "kernels", "127.0.0.1:", "night", "sgd:learning_rate=0.5", "ssp:s=2", "MiB")
    assert "none, as ssp brings it (--staleness)" in server.output()
    for word in (*block, "open until a worker initialises the run"):
        assert word in server.output()
    assert server.ready == {
        "data": server.data,
        "control": server.control,
        "metrics": server.metrics,
        "pid": server.pid,
        "run_id": "night",
    }
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=60) as page:
        assert b"pyps_" in page.read()


def test_a_server_that_cannot_start_ends_with_one_sentence(tmp_path):
    path = tmp_path / "missing" / "ready.json"
    refused = [
        (["--ready-file", str(path)], [f"the ready file {path} cannot be written: {path.parent} is no folder"]),
        (["--optimizer", "sgd:momentum=1"], ["--optimizer", "momentum", "learning_rate"]),
        (["--host", "no.such.host.invalid", "--insecure"], ["no.such.host.invalid"]),
        (["--host", "0.0.0.0"], ["--token-file", "--insecure"]),
        ([], ["PYPS_ISA", "cannot be used"]),
    ]
    with contextlib.ExitStack() as stack:
        for flag in ("--port", "--control-port", "--metrics-port"):
            holder = stack.enter_context(contextlib.closing(socket.create_server(("127.0.0.1", 0))))
            port = holder.getsockname()[1]
            refused.append(([flag, str(port)], [f"port {port} is taken", flag]))
        for flags, words in refused:
            env = {"PYPS_ISA": "nonsense"} if "PYPS_ISA" in words else None
            server = stack.enter_context(ServerProcess(*flags, env=env, wait=False))
            assert server.wait() == 2, flags
            [line] = server.output().splitlines()
            assert line.startswith("pyps:") and all(word in line for word in words), line


def test_what_the_first_parameters_took_is_given_back_once_they_serve(start_server, monkeypatch):
    server, served = start_server(), []
    module = "pyps.service.parameter_server"
    run = server._server._run
    monkeypatch.setattr(f"{module}.give_back_free_memory", lambda: served.append(len(run.content.shards)))
    with WireWorker(server.data) as worker:
        worker.join(1.0)
        assert served == [len(worker.plan.shards)]


def test_a_signal_ends_the_server_with_0_and_parked_pulls_with_unavailable(start_server_process):
    for number in (signal.SIGTERM, signal.SIGINT):
        server = start_server_process()
        with WireWorker(server.data) as worker:
            worker.join()
            pull = parked_pull(worker, 1)
            assert worker.heartbeat().known
            server.signal(number)
            assert refusal_of(list, pull)[0] == "UNAVAILABLE"

            assert server.wait(60) == 0
        assert "Traceback" not in server.output()


HUGE = Model((Tensor("x", (UNREAD,)),))


def test_the_first_signal_does_not_cut_an_end_short_that_began_before(start_server_process):
    server = start_server_process("--drain-seconds", "100", "--exit-when", "gone")
    with WireWorker(server.data, model=HUGE) as worker:
        worker.join()
        pull = unread_pull(worker)
        worker.leave()
        server.wait_for_output("server ends")
        server.signal(signal.SIGTERM)
        pull.cancel()
        assert server.wait() == 0


def test_a_second_signal_says_what_is_not_saved_and_a_third_ends_the_server_at_once(start_server_process, tmp_path):
    for folder in ((), ("--checkpoint-dir", str(tmp_path))):
        server = start_server_process("--drain-seconds", "100", *folder)
        with WireWorker(server.data, model=HUGE) as worker:
            worker.join()
            if folder:
                # A new run's first one.
                server.wait_for_output("checkpoint written")
            pull = unread_pull(worker)
            worker.push(worker.push_request(1.0), worker.push_request(1.0))
            server.signal(signal.SIGTERM)
            server.wait_for_output("server ends")
            if folder:
                server.signal(signal.SIGTERM)
                server.wait_for_output("is saving, 2 updates not saved yet: another signal ends it without them")
            # One that follows at once is none: a launcher that is killed sends two.
            wait_until(lambda server=server: server.signal(signal.SIGTERM) or not server.running, what="the end")
            assert server.wait() == 128 + signal.SIGTERM
            assert "another signal: exit at once, 2 updates not saved" in server.output()
            pull.cancel()


def test_stop_after_updates_finishes_the_run_and_tells_the_workers(start_server, tmp_path):
    folder = tmp_path / "checkpoints"
    server = start_server("--stop-after", "updates=3", "--checkpoint-dir", str(folder))
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
        wait_until(lambda: inspect(server.control, "GetStatus").durable_version == 3, 20, "the checkpoint at the end")
        # A pull that waits for a version that will never come is answered with what there is.
        want = wire.PullRequest.Want(shard_id=0, held_version=2, min_version=9)
        assert worker.pull([want], wait_seconds=20)[0].version == 3


def test_stop_after_examples_and_seconds_finish_the_run(start_server):
    by_examples = start_server("--stop-after", "examples=64")
    with WireWorker(by_examples.data) as worker:
        worker.join()
        worker.push(worker.push_request(1.0, example_count=63))
        assert worker.heartbeat().command != Command.COMMAND_STOP
        worker.push(worker.push_request(1.0, base_version=1, example_count=1))
        assert worker.heartbeat().command == Command.COMMAND_STOP
    by_seconds = start_server("--stop-after", "seconds=0.2")
    with WireWorker(by_seconds.data) as worker:
        worker.join()
        wait_until(lambda: worker.heartbeat().command == Command.COMMAND_STOP, 20, "the stop")


def test_finishing_a_job_that_waits_for_a_shard_does_not_hold_up_the_server(start_server, monkeypatch):
    server = start_server("--exit-when", "gone")
    run, begun, let_go = server._server._run, threading.Event(), threading.Event()
    finish = run.finish
    monkeypatch.setattr(run, "finish", lambda reason: (begun.set(), let_go.wait(20), finish(reason)))
    try:
        with WireWorker(server.data) as worker:
            worker.join()
            worker.leave()
        assert begun.wait(20)
        server.wait_for_look()
    finally:
        let_go.set()
    assert server.wait() == 0


def test_exit_when_gone_waits_for_all_expected_workers(start_server):
    server = start_server("--exit-when", "gone", "--expected-workers", "2")
    with WireWorker(server.data, "a") as first, WireWorker(server.data, "b") as second:
        first.join()
        first.leave()
        second.join()
        assert server.running
        second.leave(wire.LeaveRequest.CAUSE_FAILED)
        assert server.wait(60) == 0
    assert "all workers are done" in server.output()


def test_a_server_without_workers_ends_after_the_configured_time_whether_or_not_any_came(start_server):
    clock = Clock()
    flags = ("--exit-when", "idle=2", "--heartbeat-seconds", "0.1")
    servers = [start_server(*flags, clock=clock) for _ in range(2)]
    with make_client(servers[0].data):
        began = clock()
        clock.pass_until(lambda: clock() > began + 4, servers[0], living=["worker"])
        assert servers[0].running
    for server in servers:
        assert server.wait(60) == 0
        assert "no worker was there for 2 s" in server.output()


def test_exit_when_gone_counts_a_worker_whose_lease_ran_out(start_server):
    server = start_server("--exit-when", "gone", "--heartbeat-seconds", "0.2", "--lease-seconds", "2")
    with WireWorker(server.data) as worker:
        worker.join()
        assert server.wait(60) == 0


def test_exit_when_finished_waits_for_a_worker_that_failed_to_come_again_and_finish(start_server):
    server = start_server("--exit-when", "finished", "--expected-workers", "2")
    with WireWorker(server.data, "a") as first, WireWorker(server.data, "b") as second:
        first.join()
        second.join()
        first.leave()
        second.leave(wire.LeaveRequest.CAUSE_FAILED)
        run = server._server._run
        assert run.done and not run.workers_finished
    with WireWorker(server.data, "b") as again:
        again.join()
        again.leave()
        assert server.wait(60) == 0


def test_a_signal_before_the_workers_have_finished_is_no_success_of_one_that_exits_with_them(start_server_process):
    server = start_server_process("--exit-when", "finished")
    assert server.terminate() == 128 + signal.SIGTERM


def test_connections_beyond_the_open_files_end_no_server_and_leave_files_for_a_checkpoint(start_python, tmp_path):
    code = "import resource as r, sys; r.setrlimit(r.RLIMIT_NOFILE, (200, 200)); from pyps.cli.main import app; app()"
    ready_path, folder = tmp_path / "ready.json", tmp_path / "checkpoints"
    ports = ("--port", "0", "--control-port", "0", "--metrics-port", "0")
    files = ("--ready-file", str(ready_path), "--checkpoint-dir", str(folder))
    process = start_python("-c", code, "serve", *ports, *files)
    wait_until(lambda: ready_path.exists() or not process.running, what="the server")
    ready = json.loads(ready_path.read_text(encoding="utf-8"))
    with WireWorker(ready["data"]) as worker, contextlib.ExitStack() as idle:
        worker.join()
        for updates, port in enumerate(("data", "control"), start=1):
            host, number = ready[port].rsplit(":", 1)
            for _ in range(260):
                idle.enter_context(socket.create_connection((host, int(number)), timeout=20))
            assert worker.push(worker.push_request(1.0))[0].version_after == updates
            if port == "data":
                saved = inspect(ready["control"], "SaveCheckpoint").path
        assert process.terminate() == 0
    assert max(map(str, folder.glob("checkpoint-*"))) > saved
    assert "Traceback" not in process.output()
