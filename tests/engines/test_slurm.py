"""Jobs of `pyps slurm` on a real Slurm: they train, lose nodes, are cancelled and put back, and end as they should.

The commands are those of docs/slurm.md.
"""

import contextlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_cluster import Cluster, why_not
from support import ROOT, wait_until

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"no Slurm here: {why_not()}")

PAGE = (ROOT / "docs" / "slurm.md").read_text(encoding="utf-8")
COMMANDS = [line for block in PAGE.split("```")[1::2] for line in block.strip().splitlines()]
# All of the page: each is run below, but for one that unit/test_slurm_script.py runs.
TRAIN, LOG, STATUS, SAVE, EXPORT, CANCEL, RESUME, SUBMIT, _PRINT, QUEUE = COMMANDS
# Trains until there is a file of that name; the first worker ends with the status in it.
WORKER = """
import os, pathlib, time, numpy, pyps_client
end = pathlib.Path("end")
with pyps_client.Client({"w": numpy.zeros(32, numpy.float32)}, launch=pyps_client.Launch(shard_size=16)) as client:
    print("gpu", os.environ.get("CUDA_VISIBLE_DEVICES"), "of", os.uname().nodename)
    print("begins at", client.global_step, flush=True)
    while not end.exists():
        for _ in range(20):
            client.exchange({"w": numpy.ones(32, numpy.float32)})
            time.sleep(0.01)
        print("came to", client.global_step, flush=True)
raise SystemExit(int(end.read_text()) if os.environ["PYPS_WORKER_INDEX"] == "0" else 0)
"""
# Ends by itself.
SCRIPT = """
import torch, pyps_client
inputs, model = torch.randn(1000, 10), torch.nn.Linear(10, 1)
optimizer = pyps_client.RemoteOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.02))
for step in range(100):
    optimizer.zero_grad()
    loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
print("loss", loss.item())
"""
# On a machine with much other work.
DEADLINE_SECONDS = 150.0


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    with contextlib.closing(Cluster(4)) as cluster:
        yield cluster


@pytest.fixture
def cluster(nodes: Cluster) -> Iterator[Cluster]:
    nodes.wait_until_idle()
    yield nodes
    nodes.run("scancel --user=root")


class Job:
    """A job that was submitted by a command, in a folder of its own."""

    def __init__(self, cluster: Cluster, folder: Path, command: str, script: str = WORKER, **environment: str):
        self._cluster = cluster
        self._folder = folder
        (folder / "train.py").write_text(script, encoding="utf-8")
        said = self.shell(command, **environment)
        [self.id] = re.findall(r"^Submitted batch job (\d+)$", said, re.M)

    def shell(self, command: str, **environment: str) -> str:
        """What a command says in the job's folder."""
        return self._cluster.run(command, cwd=self._folder, **environment)

    @property
    def output(self) -> str:
        path = self._folder / f"slurm-{self.id}.out"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def steps(self, said: str) -> list[int]:
        return [int(step) for step in re.findall(rf"^\d: {said} (\d+)$", self.output, re.M)]

    def wait_until_it_trains(self, *, workers: int, lives: int = 1) -> None:
        wait_until(lambda: len(self.steps("begins at")) >= workers * lives, DEADLINE_SECONDS, "the workers' beginning")
        before = len(self.steps("came to"))
        wait_until(lambda: len(self.steps("came to")) > before + workers, what="progress")

    def wait(self) -> tuple[str, str]:
        wait_until(lambda: self._state not in ("PENDING", "RUNNING", "COMPLETING"), DEADLINE_SECONDS, "the end")
        return self._state, self._cluster.state_of(self.id)["ExitCode"]

    @property
    def _state(self) -> str:
        return self._cluster.state_of(self.id)["JobState"]

    def let_end(self, status: int = 0) -> None:
        (self._folder / "end").write_text(str(status), encoding="utf-8")


def test_a_job_trains_to_its_end_and_leaves_a_model_and_no_keys(cluster, tmp_path):
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    job = Job(cluster, tmp_path, SUBMIT, SCRIPT)

    assert job.wait() == ("COMPLETED", "0:0")
    losses = re.findall(r"^\d: loss (\S+)$", job.output, re.M)
    assert len(losses) == 4
    assert all(float(loss) < 1 for loss in losses)
    job.shell(EXPORT)
    assert (tmp_path / "model.safetensors").exists()
    assert "server ended" in job.shell(LOG)
    assert [*tmp_path.glob("runs/pyps/job-*")] == []


def test_commands_look_inside_a_job_that_lost_a_worker_node(cluster, tmp_path):
    job = Job(cluster, tmp_path, "pyps slurm --workers 2 --worker-sbatch --nodes=2 -- python train.py")
    job.wait_until_it_trains(workers=2)
    assert re.search(r"workers alive +│ 2 ", job.shell(STATUS))
    assert job.shell(SAVE).count("wrote ") == 2
    assert f"{job.id}+0 RUNNING None" in job.shell(QUEUE)
    assert [(path.stat().st_mode & 0o77) for path in tmp_path.glob("runs/pyps/job-*")] == [0]

    cluster.cut_power("node3")

    before = len(job.steps("came to"))
    wait_until(lambda: len(job.steps("came to")) > before + 3, what="the other worker's going on")
    job.let_end()
    assert job.wait() == ("COMPLETED", "0:0")
    assert "Node failure on node3" in job.output
    cluster.boot("node3")


def test_a_job_resumes_after_scancel_and_after_preemption(cluster, tmp_path):
    job = Job(cluster, tmp_path, TRAIN)
    job.wait_until_it_trains(workers=4)
    assert len(set(re.findall(r"gpu (\d of node\d)", job.output))) == 4
    job.shell(CANCEL)
    assert job.wait()[0] == "CANCELLED"

    resumed = Job(cluster, tmp_path, RESUME)
    resumed.wait_until_it_trains(workers=4)
    assert min(resumed.steps("begins at")) >= max(job.steps("came to")) > 0

    before = max(resumed.steps("came to"))
    cluster.run("sbatch --partition=urgent --nodes=4 --exclusive --wrap=true")
    resumed.wait_until_it_trains(workers=4, lives=2)
    assert min(resumed.steps("begins at")[4:]) >= before
    resumed.let_end(status=3)
    assert resumed.wait() == ("FAILED", "3:0")


@pytest.mark.parametrize("node", ["node0", "node1"])
def test_a_job_begins_again_where_a_server_s_node_dies(cluster, tmp_path, node):
    command = "pyps slurm --workers 2 --checkpoint-seconds 0.5 -- python train.py"
    job = Job(cluster, tmp_path, command, PYPS_LOSS_WAIT_SECONDS="2")
    job.wait_until_it_trains(workers=2)
    wait_until(
        lambda: {path.parent.name for path in tmp_path.glob("runs/pyps/*/checkpoint-*")} == {"server-0", "server-1"},
        DEADLINE_SECONDS,
    )

    cluster.cut_power(node)
    cluster.boot(node)

    job.wait_until_it_trains(workers=2, lives=2)
    assert min(job.steps("begins at")[2:]) > 0
    job.let_end()
    assert job.wait() == ("COMPLETED", "0:0")
    assert [*tmp_path.glob("runs/pyps/job-*")] == []


def test_a_job_fails_at_once_where_a_server_ends_by_itself(cluster, tmp_path):
    folder = "it's %j a\\b"
    job = Job(cluster, tmp_path, f"pyps slurm --workers 2 --folder {shlex.quote(folder)} -- python train.py")
    job.wait_until_it_trains(workers=2)
    cluster.run("kill -9 $(pgrep -x pyps)", on="node1")
    assert job.wait() == ("FAILED", "1:0")
    assert "A server ended, and the run cannot go on without it" in job.output
    assert all((tmp_path / folder / f"log-of-server-{index}.txt").stat().st_size for index in (0, 1))


def test_a_job_goes_on_with_a_standby_where_a_server_is_killed(cluster, tmp_path):
    job = Job(cluster, tmp_path, "pyps slurm --standby --servers 1 --workers 2 -- python train.py")
    job.wait_until_it_trains(workers=2)
    log = tmp_path / "runs/pyps/log-of-standby-0.txt"
    wait_until(lambda: "all shards are here" in log.read_text(encoding="utf-8"), what="a standby that follows")

    cluster.run("kill -9 $(pgrep -x pyps)", on="node0")

    wait_until(lambda: "has taken over" in log.read_text(encoding="utf-8"), DEADLINE_SECONDS, "the standby")
    before = len(job.steps("came to"))
    wait_until(lambda: len(job.steps("came to")) > before + 4, DEADLINE_SECONDS, "the workers' going on")
    job.let_end()
    assert job.wait() == ("COMPLETED", "0:0")
    assert len(job.steps("begins at")) == 2
    assert "last checkpoint" not in job.output


@pytest.mark.parametrize(("program", "end"), [("true", ("COMPLETED", "0:0")), ("nosuchprogram", ("FAILED", "127:0"))])
def test_a_job_without_servers_ends(cluster, tmp_path, program, end):
    job = Job(cluster, tmp_path, f"pyps slurm --workers 2 -- {program}")
    assert job.wait() == end
    assert "last checkpoint" not in job.output
