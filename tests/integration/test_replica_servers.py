"""Replicas on more servers than parts: each server has its share, and what people set reaches every replica."""

from __future__ import annotations

from pathlib import Path

import pytest

from inspection import inspect
from replica_jobs import DEADLINE, Start, control_addresses, run, shards_of, workers_of
from support import wait_until

NUM_SERVERS = 4
pytestmark = pytest.mark.timeout(2 * DEADLINE)


def blocked(address: str) -> dict[str, float]:
    """Seconds that each process was kept waiting for others."""
    return {name: worker.blocked_seconds for name, worker in workers_of(address).items()}


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_two_parts_lie_on_all_of_four_servers_and_replicas_obey_a_change(
    start_python: Start, tmp_path: Path, num_replicas: int
) -> None:
    release = tmp_path / "release"
    job = run(
        *(start_python, "--servers", str(NUM_SERVERS), "--replicas", str(num_replicas), "--parts", "2"),
        script=("--steps", "3", "--hold", str(release)),
    )
    addresses = control_addresses(job)
    leaders = [f"replica-{index}/0" for index in range(num_replicas)]

    def stepping() -> bool:
        known = workers_of(addresses[0])
        return all(name in known and known[name].counts for name in leaders)

    wait_until(stepping, DEADLINE, "a push of every leader to server 0")
    shards = [inspect(address, "ListShards").shards for address in addresses]
    assert all(shards), "a server without a share of the work"
    # Each part is a half of the model, and so two servers'.
    assert [{shard.part for shard in of_server} for of_server in shards] == [{0}, {0}, {1}, {1}]
    # Every push is an update so far, and nobody waits once it trains.
    waited = blocked(addresses[0])
    change = start_python("-m", "pyps", "set", "--protocol", "serial", "--servers", ",".join(addresses))
    assert change.wait() == 0, change.output()

    assert {inspect(address, "GetStatus").protocol for address in addresses} == {"serial"}
    if num_replicas > 1:
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
    assert job.wait(DEADLINE) == 0, job.output()
    assert job.output().count("after ") >= 2 * num_replicas
