"""`pyps status`, `set`, `export`, `eval`, `save`, `stop` and `reset` against real servers, as a user types them."""

import json
import urllib.request
from collections.abc import Sequence
from concurrent import futures

import grpc
import numpy as np

from client_support import addresses, gradients_like, make_client, small_model, start_servers
from pyps.cli import status as status_command
from pyps.run import handshake
from pyps_client import Launch, Session
from pyps_wire import common_pb2 as common
from pyps_wire import work_pb2 as work
from pyps_wire.common_pb2 import GroupSettings, OptimizerSettings
from pyps_wire.contract import WORK_QUEUE, stub_of
from pyps_wire.partition import Model, Tensor
from support import AnyServer, configure, inspect, server_port, shell, wait_until, workers_of
from wire_worker import WireWorker


def controls(servers: Sequence[AnyServer]) -> str:
    return ",".join(server.control for server in servers)


def train(servers: Sequence[AnyServer]) -> dict[str, np.ndarray]:
    with make_client(addresses(servers)) as client:
        for step in range(3):
            client.push(gradients_like(small_model(), seed=step), examples=10)
        return client.pull()


def test_status_shows_servers_workers_and_shards_and_says_what_is_missing(start_server):
    servers = start_servers(start_server, 2)
    empty = shell("status", "--servers", controls(servers))
    assert f"no run yet: a worker starts it (PYPS_SERVERS={addresses(servers)})" in empty
    assert "CRC-32" not in empty and "silent for" not in empty
    with make_client(addresses(servers), worker_id="[red]worker[/red]") as client:
        for step in range(3):
            client.push(gradients_like(small_model(), seed=step))
        half = shell("status", "--servers", servers[0].control)
    assert "server 1 of 2 was not named: name all with --servers" in half
    assert "not counted" in half and "no run yet" not in half

    output = shell("status", "--wide", "--servers", controls(servers))
    # A worker's own words are shown as they are, not as markup.
    for words in (*controls(servers).split(","), "[red]worker[/red]", "finished", "async, divide, adagrad", "KiB"):
        assert words in output
    assert "not named" not in output
    for server in servers:
        for shard in inspect(server.control, "ListShards").shards:
            assert shard.checksum in output

    answer = json.loads(shell("status", "--json", "--servers", controls(servers)))
    first, second = answer["servers"]
    assert (first["address"], second["address"]) == (servers[0].control, servers[1].control)
    assert first["status"]["state"] == "RUN_STATE_READY"
    assert first["status"]["versionMax"] == "3"
    assert first["workers"][0]["state"] == "finished"
    assert len(first["shards"]) == first["status"]["numShards"]


def test_status_fits_80_columns_and_repeats_by_watch(start_server, monkeypatch):
    servers = [start_server("--heartbeat-seconds", "0.05") for _ in range(2)]
    names = [f"worker-{index}" for index in range(2)]
    for name in names:
        with make_client(addresses(servers), worker_id=name, run_id="run") as client:
            client.report(loss=0.125)
            client.push(gradients_like(small_model(), seed=1))
            wait_until(lambda name=name: workers_of(servers[0].control)[name].scalars, what="its report")
    for columns in (80, 120):
        shown = shell("status", "--servers", controls(servers), COLUMNS=str(columns))
        assert max(map(len, shown.splitlines())) <= columns and "…" not in shown
        for name in names:
            [row] = [line for line in shown.splitlines() if f" {name} " in line and "│" in line]
            assert [cell.strip() for cell in row.split("│")[1:-1]] == [name, "finished", "1", "0.125", "0.00, max 0"]
    assert "CRC-32" not in shown and "CRC-32" in shell("status", "--wide", "--servers", controls(servers))

    pauses = iter([None])

    def pause(seconds: float) -> None:
        if next(pauses, KeyboardInterrupt) is KeyboardInterrupt:
            raise KeyboardInterrupt

    monkeypatch.setattr(status_command.time, "sleep", pause)
    watched = shell("status", "--watch", "--wide", "--servers", controls(servers))
    assert watched.count("┃ control ") == 2 and "step lost" in watched and "CRC-32" not in watched


def test_a_server_that_is_not_there_or_none_is_one_sentence(start_server, tmp_path):
    nobody, there = f"127.0.0.1:{server_port()}", start_server()
    output = shell("status", "--servers", nobody, status=1)
    assert output.splitlines() == [f"pyps: no server answers on {nobody}: check the address and that the server runs"]
    output = shell("status", "--servers", f"{there.control},{nobody}", status=1)
    assert there.control in output and f"no server answers on {nobody}" in output
    answer = json.loads(shell("status", "--json", "--servers", nobody, status=1).partition("\npyps:")[0])
    assert "no server answers" in answer["servers"][0]["error"]
    for servers, words in (
        ("", "No servers were named"),
        ("a b", "'a b' is malformed"),
        ("a:99999", "port 99999; expected 1 to 65535"),
    ):
        assert words in shell("status", "--servers", servers, status=2)
    assert nobody in shell("export", str(tmp_path / "f"), "--servers", nobody, "--wait-seconds", "0.5", status=1)
    with futures.ThreadPoolExecutor(1) as executor:
        other_server = grpc.server(executor)
        port = other_server.add_insecure_port("127.0.0.1:0")
        other_server.start()
        output = shell("status", "--servers", f"127.0.0.1:{port}", status=1)
        other_server.stop(None)
    assert f"127.0.0.1:{port} speaks gRPC but is no port of a pyps server" in output


def test_either_port_of_a_server_does_for_every_command(start_server, tmp_path):
    servers = start_servers(start_server, 2)
    train(servers)
    mixed = f"{servers[0].data},{servers[1].control}"
    answer = json.loads(shell("status", "--json", "--servers", mixed))
    assert [server["address"] for server in answer["servers"]] == [server.control for server in servers]
    script = tmp_path / "score.py"
    script.write_text("def evaluate(parameters): return len(parameters)\n", encoding="utf-8")
    assert "5,002 parameters" in shell("export", str(tmp_path / "file"), "--servers", mixed)
    assert "update 3  score 4" in shell("eval", str(script), "--once", "--servers", controls(servers))
    assert shell("health", "--servers", mixed).count("SERVING") == 2
    assert shell("stop", "--servers", addresses(servers)).count("has finished its run") == 2


def test_status_needs_the_token_of_its_servers(start_server, tmp_path):
    token = tmp_path / "token"
    token.write_text("correct horse\n", encoding="utf-8")
    server = start_server("--token-file", str(token))
    assert "wants a token" in shell("status", "--servers", server.control, status=1)
    assert server.control in shell("status", "--servers", server.control, "--token-file", str(token))
    refused = shell("status", "--servers", server.control, "--token-file", str(tmp_path / "none"), status=2)
    assert "none cannot be read: No such file or directory" in " ".join(refused.split())


def test_export_eval_save_and_replay_say_what_they_need(start_server, tmp_path):
    script, file, server = tmp_path / "score.py", str(tmp_path / "file"), start_server()
    script.write_text("def evaluate(parameters): return 0.0\n", encoding="utf-8")
    for arguments, words in (
        (("export", file, "--servers", ""), "No servers were named"),
        (("export", f"{file}/x", "--servers", server.data), f"cannot be written: there is no folder {file}"),
        (("export", file, "--checkpoint", "/nonexistent"), "there is no folder /nonexistent"),
        (("export", file, "--checkpoint", str(tmp_path)), f"there is no whole checkpoint in {tmp_path}"),
        (("save", "--servers", server.control), "start it with --checkpoint-dir"),
        (("replay", str(tmp_path)), f"there is no update log in {tmp_path}"),
    ):
        assert words in shell(*arguments, status=1), arguments
    where = ("--servers", server.data, "--wait-seconds", "0.5")
    for output in (shell("export", file, *where, status=1), shell("eval", str(script), *where, status=2)):
        assert "no worker has initialised the run yet" in output
        assert "start_wait_seconds" not in output
    assert "default: 127.0.0.1:7610]" in " ".join(shell("export", "--help").split())


def test_stop_and_reset_end_and_forget_a_run(start_server):
    servers = start_servers(start_server, 2)
    assert "holds no run" in shell("stop", "--servers", controls(servers), status=1)
    with make_client(addresses(servers), run_id="mine") as client:
        client.push(gradients_like(small_model(), seed=1))
        shell("stop", "--servers", controls(servers))
        assert {inspect(server.control, "GetStatus").state for server in servers} == {common.RUN_STATE_FINISHED}
    refused = shell("reset", "another", "--servers", controls(servers), status=1)
    assert refused.count("not run 'another': name the run to reset") == 2
    assert shell("reset", "mine", "--servers", controls(servers)).count("has forgotten run 'mine'") == 2
    assert {inspect(server.control, "GetStatus").state for server in servers} == {common.RUN_STATE_EMPTY}


def test_status_shows_the_transport_of_each_worker(start_server):
    servers = [start_server(), start_server("--local-socket", "off")]
    with session(servers, "near") as near, session(servers, "far", transport="grpc") as far:
        assert (near.lend() and near.transport, far.lend() and far.transport) == ("mixed", "grpc")
        answers = json.loads(shell("status", "--json", "--servers", addresses(servers)))["servers"]
        table = shell("status", "--wide", "--servers", addresses(servers))
        with urllib.request.urlopen(f"http://{servers[0].metrics}/metrics", timeout=20) as page:
            counted = page.read().decode()
        shared = [inspect(server.control, "GetMemory").shared_bytes for server in servers]
    # Gradients and parameters of the whole model: the segment is one for all servers.
    assert shared[0] >= 2 * 4 * 2048 and shared[1] == 0
    shown = [{worker["workerId"]: worker["transport"] for worker in answer["workers"]} for answer in answers]
    assert shown == [{"near": near, "far": "grpc"} for near in ("shm", "grpc")]
    for name in ("shm", "grpc"):
        assert f'pyps_workers_by_transport{{transport="{name}"}} 1.0' in counted
    rows = {line.split()[1]: line for line in table.splitlines() if " alive" in line and "workers" not in line}
    assert "grpc, shm" in rows["near"]
    assert "shm" not in rows["far"] and "grpc" in rows["far"]
    wait_until(lambda: not inspect(servers[0].control, "GetMemory").shared_bytes, what="the end of its memory")
    assert transports(servers[0]) == shown[0], "of workers that left, their last"
    with session(servers, "near", transport="grpc"):
        assert transports(servers[0])["near"] == "grpc", "its next life"


def transports(server: AnyServer) -> dict[str, str]:
    return {worker.worker_id: worker.transport for worker in inspect(server.control, "ListWorkers").workers}


def session(servers: Sequence[AnyServer], worker_id: str, **options: str) -> Session:
    """A worker's session, with a shard on each of two servers."""
    model = Model((Tensor("t", (2048,)),), shard_size=1024)
    launch = Launch(servers=tuple(addresses(servers).split(",")), worker_id=worker_id, start_wait_seconds=30, **options)
    optimizer = OptimizerSettings(rule="sgd", groups=[GroupSettings(hyperparameters={"learning_rate": 1.0})])
    return Session(model, optimizer, launch=launch, initial=lambda: [np.zeros(2048, np.float32)])


def test_set_changes_all_servers_named_and_says_what_is_in_force(start_server):
    servers = start_servers(start_server, 2)
    changes = ("--protocol", "1-softsync", "--staleness", "none", "--learning-rate", "0.01")
    with make_client(addresses(servers)) as client:
        client.push(gradients_like(small_model(), seed=1))
        output = shell("set", *changes, "--schedule", "step:every=10,factor=0.5", PYPS_CONTROL=controls(servers))
        client.push(gradients_like(small_model(), seed=2))
    in_force = "softsync:n=1, staleness none, learning rate 0.01, schedule step:every=10,factor=0.5."
    assert output.splitlines() == [f"{server.control}: {in_force}" for server in servers]
    shown = shell("status", "--wide", "--servers", controls(servers))
    assert shown.count("softsync:n=1, none, adagrad") == 2
    assert "step:every=10,factor=0.5" in shown and "0.01" in shown
    assert shown.count("settings changed") == 2
    answer = json.loads(shell("status", "--json", "--events", "1000", "--servers", controls(servers)))
    for server in answer["servers"]:
        assert [event["kind"] for event in server["events"]].count("configured") == 1
        assert server["status"]["learningRates"][0]["base"] == 0.01
    assert shell("status", "--events", "0", "--servers", controls(servers)).count("settings changed") == 0


def test_what_cannot_be_set_is_one_sentence_and_changes_nothing(start_server):
    server = start_server()
    refused = shell("set", "--protocol", "async", "--servers", server.control, status=1)
    assert "this server holds no run yet: start its workers first" in refused
    with WireWorker(server.data) as worker:
        worker.join()
        for arguments, status, words in (
            ((), 2, "nothing was named to set: give --protocol, --staleness, --learning-rate, --schedule or"),
            (("--staleness", "sometimes"), 1, "'sometimes' is unknown; expected one of"),
            (("--learning-rate", "fast"), 2, "Invalid value for '--learning-rate'"),
        ):
            assert words in shell("set", "--servers", server.control, *arguments, status=status)
        assert inspect(server.control, "GetStatus").staleness == "divide"


def test_set_on_some_of_the_servers_changes_nothing_unless_it_is_meant(start_server):
    servers = start_servers(start_server, 2)
    change = ("set", "--protocol", "softsync:n=1", "--servers", servers[0].control)
    with make_client(addresses(servers)) as client:
        client.push(gradients_like(small_model(), seed=1))
        refused = shell(*change, status=1)
        untouched = inspect(servers[0].control, "GetStatus").protocol
        shell(*change, "--partial")
        changed = inspect(servers[0].control, "GetStatus").protocol
    assert "nothing was set, as the run has 2 servers: server 1 of 2 was not named" in refused
    assert (untouched, changed) == ("async", "softsync:n=1")


def test_a_command_that_one_server_refuses_changes_none(start_server, tmp_path):
    servers = [
        start_server("--checkpoint-dir", str(tmp_path / "first")),
        start_server("--bounds", "learning_rate_max=0.5"),
    ]
    with make_client(addresses(servers), run_id="mine") as client:
        client.push(gradients_like(small_model(), seed=1))

        def state() -> tuple[object, ...]:
            status = inspect(servers[0].control, "GetStatus")
            return status.state, status.learning_rates, inspect(servers[0].control, "ListEvents").events[-1].number

        def refused(*command: str) -> str:
            before = state()
            output = shell(*command, "--servers", controls(servers), status=1)
            assert state() == before
            assert servers[1].control in output and servers[0].control not in output
            return output

        assert "above learning_rate_max=0.5" in refused("set", "--learning-rate", "0.75", "--expected-workers", "5")
        assert "start it with --checkpoint-dir" in refused("save")
        assert not list((tmp_path / "first").glob("checkpoint-*"))
        shell("reset", "mine", "--servers", servers[1].control)
        assert "there is nothing to stop" in refused("stop")
        assert "there is nothing to reset" in refused("reset", "mine")
        assert inspect(servers[0].control, "GetStatus").run_id == "mine"


def test_set_after_the_workers_warns_for_those_known_and_after_the_run_is_refused(start_server):
    server = start_server()
    with WireWorker(server.data) as worker:
        worker.join()
        worker.push(worker.push_request(1.0))
        worker.leave()
    change = ("set", "--protocol", "backup:b=9", "--servers", server.control)
    assert "warns: backup:b=9 with 1 worker waits for no worker" in shell(*change)
    events = [event.message for event in inspect(server.control, "ListEvents").events if event.kind == "configured"]
    assert events == ["settings changed: protocol backup:b=9"]
    shell("stop", "--servers", server.control)
    assert "the run has finished: nothing in it can be set any more" in shell(*change, status=1)


def test_status_shows_whom_a_round_waits_for_and_set_what_became_of_waiting_gradients(start_server):
    server = start_server("--protocol", "hardsync", "--expected-workers", "2")
    with WireWorker(server.data, "quick") as quick, WireWorker(server.data, "slow") as slow:
        quick.join()
        quick.push(quick.push_request(1.0))
        alone = shell("status", "--servers", server.control)
        slow.join()
        # Both are active in the round from here on.
        slow.push(slow.push_request(1.0))
        quick.push(quick.push_request(1.0, base_version=1))
        shown = shell("status", "--servers", server.control)
        output = shell("set", "--protocol", "async", "--servers", server.control)
    assert "1: quick; 1 still to come" in alone and "waiting gradients" in alone
    assert "2: quick, slow" in shown and "worker joined" in shown
    assert f"{server.control} its round waits for the gradients of slow" in shown
    assert "async, staleness divide, learning rate 1; 1 gradient that waited became 1 update." in output


def test_status_shows_rare_events_among_those_of_many_workers(start_server):
    server = start_server()
    with WireWorker(server.data) as worker:
        worker.join()
        configure(server, expected_workers=7)
        for index in range(20):
            with WireWorker(server.data, f"invented-{index}") as other:
                other.hello()
                other.leave()
    shown = shell("status", "--servers", server.control)
    assert "expected workers 7" in shown and "worker left: worker invented-19" in shown


def test_status_escapes_control_characters(start_server, monkeypatch):
    monkeypatch.setattr(handshake, "check_name", lambda name, what: None)
    server = start_server()
    with WireWorker(server.data, "\x1b[31mred\nline\x07") as worker:
        worker.join()
        data = work.DataSpec(num_examples=10, batch_size=1)
        stub_of(WORK_QUEUE, worker.channel).Open(work.OpenWorkRequest(sender=worker.sender, data=data), timeout=60)
        shown = shell("status", "--wide", "--servers", server.control)
    assert shown.count("?[31mred?line?") >= 3
    assert all(character.isprintable() or character == "\n" for character in shown)
