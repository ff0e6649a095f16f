"""Replicas on more servers than parts: each server has its share, and what people set reaches every replica."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from inspection import inspect
from replica_jobs import DEADLINE, ReplicaJob, Start, serve, shards_of, wait_for_pushes, workers_of
from support import ServerThread, wait_until

NUM_SERVERS, NUM_REPLICAS = 4, 2


def blocked(address: str) -> dict[str, float]:
    """Seconds that each process was kept waiting for others."""
    return {name: worker.blocked_seconds for name, worker in workers_of(address).items()}


def test_two_parts_lie_on_all_of_four_servers_and_replicas_obey_a_change(
    start_server: Callable[..., ServerThread], start_python: Start, tmp_path: Path
) -> None:
    release = tmp_path / "release"
    servers = serve(start_server, NUM_SERVERS, replicas=NUM_REPLICAS)
    job = ReplicaJob(start_python, servers, "--steps", "3", "--hold", str(release), replicas=NUM_REPLICAS)
    addresses = job.addresses
    leaders = {f"replica-{index}/0" for index in range(NUM_REPLICAS)}
    wait_for_pushes(job, leaders)
    shards = [inspect(address, "ListShards").shards for address in addresses]
    assert all(shards), "a server without a share of the work"
    # Each part is a half of the model, and so two servers'.
    assert [{shard.part for shard in of_server} for of_server in shards] == [{0}, {0}, {1}, {1}]
    # Every push is an update so far, and nobody waits once it trains.
    waited = blocked(addresses[0])
    change = start_python("-m", "pyps", "set", "--protocol", "serial", "--servers", ",".join(addresses))
    assert change.wait() == 0, change.output()

    assert {inspect(address, "GetStatus").protocol for address in addresses} == {"serial"}

    # In turns each of them waits for the other, at server 0, and is told so only where it asks.
    def in_turns() -> bool:
        now = blocked(addresses[0])
        return all(now[name] > waited[name] for name in leaders)

    wait_until(in_turns, DEADLINE, "a turn of every replica")
    before = [shard.version for shard in shards_of(addresses)]
    wait_until(
        lambda: all(now.version > then + 5 for now, then in zip(shards_of(addresses), before, strict=True)),
        DEADLINE,
        "further updates",
    )
    release.touch()
    assert all("after " in output for output in job.ended_well())
