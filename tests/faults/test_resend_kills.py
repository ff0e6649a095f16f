"""Servers killed again and again while workers push: each acknowledged push is in the parameters once, and no other."""

import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from client_support import addresses, make_client
from pyps_wire.common_pb2 import OUTCOME_REJECTED
from support import ServerProcess, status_of, wait_until

NUM_SERVERS, NUM_WORKERS, KILLS_EACH = 2, 3, 2
MODEL = {"x": np.zeros(4000, np.float32)}
# Each update takes 1 from each number, or as much on average.
SGD = ("sgd", {"learning_rate": 1.0})

# A shard, a worker and its push.
PushId = tuple[int, str, int]


def lives_of(folder: Path) -> dict[int, dict[int, list[dict]]]:
    """The lines of each shard's log, by the server's epoch."""
    found: dict[int, dict[int, list[dict]]] = {}
    for file in folder.glob("*.epoch-*/shard-*.jsonl"):
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
        found.setdefault(lines[0]["shard_id"], {})[lines[0]["run"]["epoch"]] = lines
    return found


def counted(folder: Path) -> Counter[PushId]:
    """How often each push counts: in a life up to the version with which the next one began."""
    counts = Counter[PushId]()
    for shard_id, lives in lives_of(folder).items():
        begun = {epoch: lines[0]["version"] for epoch, lines in lives.items()}
        for epoch, lines in lives.items():
            until = begun.get(epoch + 1, float("inf"))
            for line in lines:
                version = line.get("version_after", line.get("version"))
                for part in line["update"]["parts"] if "update" in line and version <= until else ():
                    counts[shard_id, part["worker_id"], part["sequence"]] += 1
    return counts


@pytest.mark.parametrize(
    ("protocol", "transport"), [("async", "shm"), ("async", "tcp"), ("softsync:n=1", "grpc"), ("hardsync", "grpc")]
)
def test_each_acknowledged_push_counts_once_though_each_server_is_killed_twice(
    start_server_process, tmp_path, protocol, transport
):
    def start(index: int, *flags: str) -> ServerProcess:
        folders = [tmp_path / f"{name}-{index}" for name in ("checkpoints", "log")]
        kept = ("--checkpoint-dir", str(folders[0]), "--checkpoint-seconds", "0.7", "--update-log", str(folders[1]))
        how = ("--protocol", protocol, "--staleness", "none", "--expected-workers", str(NUM_WORKERS))
        server: ServerProcess = start_server_process(*kept, *how, *flags)
        return server

    servers = [start(index) for index in range(NUM_SERVERS)]
    acknowledged: set[PushId] = set()
    over = threading.Event()
    counts = [0] * NUM_WORKERS

    def train(index: int) -> None:
        options = {"shard_size": 1024, "transport": transport, "worker_id": f"{index}", "run_id": "kills"}
        with make_client(addresses(servers), tensors=MODEL, optimizer=SGD, **options) as client:
            while not over.is_set():
                receipts = client.push({"x": np.ones(4000, np.float32)}, examples=1)
                acknowledged.update(
                    (receipt.shard_id, f"{index}", receipt.sequence)
                    for receipt in receipts
                    if receipt.outcome != OUTCOME_REJECTED
                )
                counts[index] += 1
                if client.session.pull_needed or counts[index] % 4 == 0:
                    client.pull()

    def pushed(count: int) -> None:
        wanted = [now + count for now in counts]
        wait_until(lambda: ended() or all(map(int.__le__, wanted, counts)), what="pushes of each worker")
        for each in training:
            assert not each.done() or each.result()

    with ThreadPoolExecutor(NUM_WORKERS) as pool:
        training = [pool.submit(train, index) for index in range(NUM_WORKERS)]

        def ended() -> bool:
            return any(each.done() for each in training)

        try:
            for kill in range(NUM_SERVERS * KILLS_EACH):
                pushed(10)
                index = kill % NUM_SERVERS
                wait_until(lambda index=index: status_of(servers[index]).durable_version > 0, what="a checkpoint")
                pushed(5)
                servers[index].kill()
                servers[index] = start(index, "--resume", "--port", servers[index].data.rpartition(":")[2])
            pushed(10)
        finally:
            over.set()
        for each in training:
            each.result(60)
    statuses = [status_of(server) for server in servers]
    assert [status.epoch for status in statuses] == [KILLS_EACH] * NUM_SERVERS
    assert all(server.terminate() == 0 for server in servers)
    found = Counter[PushId]()
    for index in range(NUM_SERVERS):
        found += counted(tmp_path / f"log-{index}")
    # Under softsync the last gradients may wait for more.
    waiting = sum(status.pending_gradients for status in statuses)
    assert len(acknowledged) - found.total() == waiting
    assert set(found.values()) == {1}
    assert found.keys() <= acknowledged
    assert waiting == 0 or protocol != "async"
    assert all(status.examples <= sum(counts) for status in statuses)
