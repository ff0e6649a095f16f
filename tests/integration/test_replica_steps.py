"""Which steps of replicas reach the servers: whole ones alone, each once, on all servers that hold something.

Dean et al. 2012, sections 3 and 4.1; the processes are real, cut by torch's own parallelize_module.
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from logged import lines_of
from pyps.update_log import log_paths
from replica_jobs import DEADLINE, ReplicaJob, Start, serve, shards_of, workers_of
from support import ServerThread, wait_until

StartServer = Callable[..., ServerThread]

# Of the process that is held before a step, and so of the other one.
STEPS = 4


def start_job(start_server: StartServer, start_python: Start, folder: Path, *flags: str) -> ReplicaJob:
    """Two replicas, each push an update, and replica-0/1 waits for the file "go" before its next step.

    Returns once it does, and the other process of its replica has begun that step.
    """
    files = ("--pause-at", str(STEPS), "--pause", str(folder / "go"), "--hold", str(folder / "release"))
    logs = [(*flags, "--update-log", str(folder / "log" / f"server-{index}")) for index in range(2)]
    servers = [server for of_server in logs for server in serve(start_server, 1, *of_server, replicas=2)]
    job = ReplicaJob(start_python, servers, "--steps", str(STEPS + 1), *files, replicas=2)
    for rank in range(2):
        job.processes[0, rank][0].wait_for_output(f"about to step 0/{rank} after {STEPS} steps", DEADLINE)
    return job


def steps_of(job: ReplicaJob) -> dict[str, int]:
    """How many steps the last life of each process took, as it ended, well."""
    return {
        f"replica-{index}/{rank}": int(steps)
        for output in job.ended_well()
        for index, rank, steps in re.findall(r"done (\d)/(\d) after (\d+) steps", output)
    }


def pushed(addresses: list[str]) -> dict[str, int]:
    """Pushed shards that became updates, by process, over all servers."""
    counts: Counter[str] = Counter()
    for address in addresses:
        counts.update({name: worker.pushes_applied for name, worker in workers_of(address).items()})
    return counts


def own_shards(addresses: list[str]) -> Counter[str]:
    """How many shards each process of replica 0 trains."""
    return Counter(f"replica-0/{shard.part}" for shard in shards_of(addresses))


def test_p5_a_step_reaches_no_server_before_every_process_has_finished_it(
    start_server: StartServer, start_python: Start, tmp_path: Path
) -> None:
    job = start_job(start_server, start_python, tmp_path)
    addresses = job.addresses
    whole_steps = {name: STEPS * count for name, count in own_shards(addresses).items()}
    assert set(whole_steps) == {"replica-0/0", "replica-0/1"}

    def of_replica_0() -> dict[str, int]:
        return {name: count for name, count in pushed(addresses).items() if name in whole_steps}

    # Time for a push is what the other replica takes for many.
    before = pushed(addresses)
    wait_until(
        lambda: all(pushed(addresses)[name] >= before.get(name, 0) + 40 for name in ("replica-1/0", "replica-1/1")),
        DEADLINE,
        "many steps of the other replica",
    )
    assert of_replica_0() == whole_steps

    (tmp_path / "go").touch()
    wait_until(
        lambda: all(count > whole_steps[name] for name, count in of_replica_0().items()), DEADLINE, "the step held"
    )
    (tmp_path / "release").touch()
    steps = steps_of(job)
    assert steps["replica-0/0"] == steps["replica-0/1"] > STEPS


def life_pushed(addresses: list[str], name: str, *, after: int) -> bool:
    """Whether a process has pushed in a life after that one."""
    known = [workers_of(address).get(name) for address in addresses]
    return any(worker is not None and worker.incarnation > after and worker.counts for worker in known)


def test_d8_a_restarted_replica_fetches_first_and_applies_no_step_twice(
    start_server: StartServer, start_python: Start, tmp_path: Path
) -> None:
    job = start_job(start_server, start_python, tmp_path)
    addresses = job.addresses
    first_life = next(w.incarnation for a in addresses for name, w in workers_of(a).items() if name == "replica-0/1")
    left, victim = job.processes[0, 0][0], job.processes[0, 1][0]
    victim.signal(signal.SIGKILL)
    # The process that was left says it in a sentence, not in a traceback.
    assert left.wait(DEADLINE) == 1
    assert "a replica ends as a whole" in left.output()
    assert "Traceback" not in left.output()

    (tmp_path / "go").touch()
    job.start(0)
    names = sorted(own_shards(addresses))
    assert names == ["replica-0/0", "replica-0/1"]
    wait_until(
        lambda: all(life_pushed(addresses, name, after=first_life) for name in names),
        DEADLINE,
        "pushes of the second life to both parts",
    )
    (tmp_path / "release").touch()
    steps = steps_of(job)
    for server in job.servers:
        server.stop()
    assert steps.keys() == {"replica-0/0", "replica-0/1", "replica-1/0", "replica-1/1"}
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
        assert [len(first), len(second)] == [STEPS, steps[f"replica-0/{part}"]]
        assert len(other) == steps[f"replica-1/{part}"]
        assert len({line["incarnation"] for line in second}) == len({line["incarnation"] for line in other}) == 1
        assert second[0]["base_version"] >= first[-1]["version_after"], "it began with what its first life had made"
        assert [line["version"] for line in lines if line["event"] == "end"] == [len(first) + len(second) + len(other)]
    assert seen == {"0", "1"}


def pushes_of_replica_0(pushes: list[dict[str, Any]], *, first_life: int, first: bool) -> list[dict[str, Any]]:
    """Those of its first life, or of its second."""
    of_replica = [line for line in pushes if line["worker_id"].startswith("replica-0/")]
    return [line for line in of_replica if (line["incarnation"] == first_life) == first]
