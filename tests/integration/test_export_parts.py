"""A model that is split into parts: export joins them, status lists them, with real servers."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from client_support import addresses, start_servers
from pyps_wire import common_pb2 as common
from pyps_wire import inspector_pb2 as pb
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.partition import partition
from replicas import CUT, cut_run, push_tensors, whole_tensors
from support import ServerThread, Start, inspect, shell
from wire_worker import WireWorker

PLAN = partition(CUT, num_servers=2)


def checkpointed_servers(start_server: Start, folder: Path, *flags: str) -> list[ServerThread]:
    return [start_server("--checkpoint-dir", str(folder / f"server-{index}"), *flags) for index in range(2)]


def test_export_joins_the_parts_live_and_saved(start_server, tmp_path):
    servers = checkpointed_servers(start_server, tmp_path)
    expected = whole_tensors()
    with cut_run(servers) as workers:
        push_tensors(workers, expected)
        output = shell("export", str(tmp_path / "live"), "--servers", addresses(servers))
        assert "3 tensors, 328 parameters" in output
        shell("save", "--servers", ",".join(server.control for server in servers))
    for server in servers:
        assert server.stop() == 0
    output = shell("export", str(tmp_path / "saved"), "--checkpoint", str(tmp_path))
    assert "3 tensors, 328 parameters" in output
    for file in ("live", "saved"):
        tensors = load_file(tmp_path / file)
        assert tensors.keys() == expected.keys()
        for name, array in tensors.items():
            np.testing.assert_array_equal(array, expected[name], strict=True)


def test_status_shows_whose_part_a_shard_is_and_nothing_of_parts_where_there_are_none(start_server):
    servers = start_servers(start_server, 2)
    control = ",".join(server.control for server in servers)
    with cut_run(servers) as workers:
        push_tensors(workers, whole_tensors())
        table = shell("status", "--wide", "--servers", control)
        answer = json.loads(shell("status", "--json", "--servers", control))
    shown = {shard["shardId"]: shard["part"] for server in answer["servers"] for shard in server["shards"]}
    assert shown == {shard.shard_id: PLAN.part_of(shard.shard_id) for shard in PLAN.shards}
    assert set(shown.values()) == {0, 1}
    assert all(shard["numWorkers"] == 1 for server in answer["servers"] for shard in server["shards"])
    (heading,) = [line for line in table.splitlines() if "CRC-32" in line]
    assert heading.replace("┃", " ").split()[-8:-6] == ["part", "workers"]

    plain = start_server()
    with WireWorker(plain.data) as worker:
        worker.join()
        worker.push_step(1.0)
        table = shell("status", "--wide", "--servers", plain.control)
    (heading,) = [line for line in table.splitlines() if "CRC-32" in line]
    assert "part" not in heading.replace("┃", " ").split()
    assert "replica" not in table and "parts" not in table


def test_each_block_of_a_tensor_is_listed_with_what_is_held_of_it(start_server):
    servers = start_servers(start_server, 2)
    expected = whole_tensors()
    with cut_run(servers) as workers:
        push_tensors(workers, expected)
        pages = [inspect(server.control, "ListTensors", pb.ListTensorsRequest(name_prefix="up")) for server in servers]
    blocks = {}
    for info in (info for page in pages for info in page.tensors):
        key = tuple(info.offset)
        begin, held = blocks.setdefault(key, (info, 0))
        blocks[key] = (begin, held + info.held_parameters)
        assert (info.name, tuple(info.whole_shape)) == ("up", (8, 20))
    assert {key: (tuple(info.shape), info.part, held) for key, (info, held) in blocks.items()} == {
        (0, 0): ((8, 10), 0, 80),
        (0, 10): ((8, 10), 1, 80),
    }
    first = next(iter(pages[0].tensors))
    np.testing.assert_array_equal(np.float32(list(first.first_values)), expected["up"][0, :8])


def test_each_server_lists_the_shards_that_a_worker_has_pushed_to_and_pulled(start_server):
    servers = start_servers(start_server, 2)
    mine = [shard.shard_id for shard in PLAN.of_server(0)]
    with cut_run(servers) as workers:
        first = workers[0]
        first.push(first.push_request(1.0, mine[2], sequence=90), first.push_request(1.0, mine[0], sequence=91))
        first.push(first.push_request(1.0, mine[2], sequence=90))
        exchanged = first.push_request(1.0, mine[1], reply_codec=common.CODEC_FLOAT32)
        assert [reply.version for reply in first.stub.Exchange(iter([exchanged]), timeout=60)] == [1]
        first.pull([wire.PullRequest.Want(shard_id=mine[0], held_version=-1)])
        first.pull([wire.PullRequest.Want(shard_id=mine[2], held_version=1)])
        (info,) = inspect(servers[0].control, "ListWorkers").workers
        assert (list(info.shards_pushed), list(info.shards_pulled)) == (mine, mine[:2])
        (info,) = inspect(servers[1].control, "ListWorkers").workers
        assert (list(info.shards_pushed), list(info.shards_pulled)) == ([], [])


def test_status_shows_which_process_of_which_replica_holds_what(start_server):
    server = start_server()
    with cut_run([server]), WireWorker(server.data, "r/0", model=CUT) as process:
        alone = shell("status", "--wide", "--servers", server.control)
        process.hello(replica="r", parts=[0])
        table = shell("status", "--wide", "--servers", server.control)
        answer = json.loads(shell("status", "--json", "--servers", server.control))
    assert "replica" not in alone
    (heading,) = [line for line in table.splitlines() if "silent for" in line]
    assert heading.replace("┃", " ").split()[5:7] == ["replica", "parts"]
    rows = [[cell.strip() for cell in line.split("│")[1:8]] for line in table.splitlines() if line.startswith("│")]
    assert [row[5:] for row in rows if row[0] == "r/0"] == [["r", "0"]]
    assert [row[5:] for row in rows if row[0] == "a"] == [["", "all"]]
    workers = {worker["workerId"]: worker for worker in answer["servers"][0]["workers"]}
    assert (workers["r/0"]["replica"], workers["r/0"]["parts"]) == ("r", [0])
    assert workers["a"]["parts"] == []
