"""Which steps of replicas reach the servers: whole ones alone, each once, on all servers that hold something.

Dean et al. 2012, sections 3 and 4.1; the processes are real, cut by torch's own parallelize_module.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from logged import lines_of
from pyps.update_log import log_paths
from replica_jobs import DEADLINE, Start, control_addresses, run, shards_of, workers_of
from support import PythonProcess, wait_until

# Of the process that is held before a step, and so of the other one.
STEPS = 4
# Joining, a second life and two ends, on a machine with other work.
pytestmark = pytest.mark.timeout(2 * DEADLINE)


def start_job(start_python: Start, folder: Path, *flags: str) -> PythonProcess:
    """Two replicas, each push an update; replica-0/1 does not begin its next step before the file "go" is there."""
    files = ("--pause-at", str(STEPS), "--pause", str(folder / "go"), "--hold", str(folder / "release"))
    sizes = ("--servers", "2", "--replicas", "2", "--parts", "2", "--protocol", "async")
    return run(start_python, *sizes, *flags, script=("--steps", str(STEPS + 1), *files))


def wait_until_held(job: PythonProcess) -> None:
    """Waits until one process of replica 0 waits before its step, and the other has begun it."""
    for rank in range(2):
        job.wait_for_output(f"about to step 0/{rank} after {STEPS} steps", DEADLINE)


def pushed(addresses: list[str]) -> dict[str, int]:
    """Pushed shards that became updates, by process, over all servers."""
    counts: Counter[str] = Counter()
    for address in addresses:
        counts.update({name: worker.pushes_applied for name, worker in workers_of(address).items()})
    return counts


def own_shards(addresses: list[str]) -> Counter[str]:
    """How many shards each process of replica 0 trains."""
    return Counter(f"replica-0/{shard.part}" for shard in shards_of(addresses))


def test_p5_a_step_reaches_no_server_before_every_process_has_finished_it(start_python: Start, tmp_path: Path) -> None:
    job = start_job(start_python, tmp_path)
    addresses = control_addresses(job)
    wait_until_held(job)
    whole_steps = {name: STEPS * count for name, count in own_shards(addresses).items()}
    assert set(whole_steps) == {"replica-0/0", "replica-0/1"}

    def of_replica_0() -> dict[str, int]:
        return {name: count for name, count in pushed(addresses).items() if name in whole_steps}

    # Time for a push is what the other replica takes for many.
    before = pushed(addresses)
    wait_until(
        lambda: all(pushed(addresses)[name] >= before[name] + 40 for name in ("replica-1/0", "replica-1/1")),
        DEADLINE,
        "many steps of the other replica",
    )
    assert of_replica_0() == whole_steps

    (tmp_path / "go").touch()
    wait_until(
        lambda: all(count > whole_steps[name] for name, count in of_replica_0().items()), DEADLINE, "the step held"
    )
    (tmp_path / "release").touch()
    assert job.wait(DEADLINE) == 0, job.output()
    done = re.findall(r"done 0/\d after (\d+) steps", job.output())
    assert len(done) == 2 and len(set(done)) == 1


def life_pushed(addresses: list[str], name: str, *, after: int) -> bool:
    """Whether a process has pushed in a life after that one."""
    known = [workers_of(address).get(name) for address in addresses]
    return any(worker is not None and worker.incarnation > after and worker.counts for worker in known)


def test_d8_a_restarted_replica_fetches_first_and_applies_no_step_twice(start_python: Start, tmp_path: Path) -> None:
    job = start_job(start_python, tmp_path, "--max-restarts", "1", "--update-log", str(tmp_path / "log"))
    addresses = control_addresses(job)
    wait_until_held(job)
    victims = [w for address in addresses for name, w in workers_of(address).items() if name == "replica-0/1"]
    first_life = victims[0].incarnation
    psutil.Process(victims[0].process_id).kill()
    job.wait_for_output("replica-0 ends", DEADLINE)
    (tmp_path / "go").touch()
    names = sorted(own_shards(addresses))
    assert names == ["replica-0/0", "replica-0/1"]
    wait_until(
        lambda: all(life_pushed(addresses, name, after=first_life) for name in names),
        DEADLINE,
        "pushes of the second life to both parts",
    )
    (tmp_path / "release").touch()
    assert job.wait(DEADLINE) == 0, job.output()

    reported = {(index, rank): int(n) for index, rank, n in re.findall(r"done (\d)/(\d) after (\d+)", job.output())}
    assert reported.keys() == {(index, rank) for index in "01" for rank in "01"}
    seen = set()
    for path in [path for index in range(2) for path in log_paths(tmp_path / "log" / f"server-{index}")]:
        lines = lines_of(path)
        pushes = [line for line in lines if line["event"] == "push"]
        assert {line["outcome"] for line in pushes} == {"applied"}
        [part] = {line["worker_id"].partition("/")[2] for line in pushes}
        seen.add(part)
        times = Counter((line["worker_id"], line["incarnation"], line["sequence"]) for line in pushes)
        assert set(times.values()) == {1}, "a push became two updates"
        first, second = (pushes_of_replica_0(pushes, first_life=first_life, first=first) for first in (True, False))
        other = [line for line in pushes if line["worker_id"] == f"replica-1/{part}"]
        # The step that the first life was held in is nowhere.
        assert [len(first), len(second)] == [STEPS, reported["0", part]]
        assert len(other) == reported["1", part]
        assert len({line["incarnation"] for line in second}) == len({line["incarnation"] for line in other}) == 1
        assert second[0]["base_version"] >= first[-1]["version_after"], "it began with what its first life had made"
        assert [line["version"] for line in lines if line["event"] == "end"] == [len(first) + len(second) + len(other)]
    assert seen == {"0", "1"}


def pushes_of_replica_0(pushes: list[dict[str, Any]], *, first_life: int, first: bool) -> list[dict[str, Any]]:
    """Those of its first life, or of its second."""
    of_replica = [line for line in pushes if line["worker_id"].startswith("replica-0/")]
    return [line for line in of_replica if (line["incarnation"] == first_life) == first]
