"""The examples that cut a model over processes: they compute what the whole model does, and train on real servers."""

import json
import re
from pathlib import Path

import pytest

from replicas import DEADLINE, ReplicaJob, serve
from support import ROOT, Start, StartPython

EXAMPLES = ROOT / "examples"
TRAINING = str(ROOT / "tests" / "replica_process.py")


def losses(start_python: StartPython, folder: Path, example: str, *how: str, processes: int) -> list[float]:
    folder.mkdir()
    world = (str(processes), str(folder / "store"))
    started = [start_python(TRAINING, example, str(rank), *world, *how) for rank in range(processes)]
    for process in started:
        assert process.wait(DEADLINE) == 0, process.output()
    found: list[float] = json.loads(started[0].output().splitlines()[-1])[example]
    return found


@pytest.mark.extended
def test_a_cut_transformer_trains_as_the_whole_one(start_python, tmp_path):
    """P1: Dean et al. 2012, section 3."""
    whole = losses(start_python, tmp_path / "whole", "transformer", "none", processes=1)
    for cut in ("tensor", "pipeline"):
        assert losses(start_python, tmp_path / cut, "transformer", cut, processes=2) == pytest.approx(whole, rel=1e-5)
    assert whole[-1] < whole[0] - 1


def test_unequal_bands_train_as_the_whole_and_send_no_node_twice(start_python, tmp_path):
    """P1 and P2: Dean et al. 2012, section 3; three bands of eight rows, so one has neighbours on both sides."""
    whole = losses(start_python, tmp_path / "whole", "patches", processes=1)

    assert losses(start_python, tmp_path / "cut", "patches", processes=3) == pytest.approx(whole, rel=1e-5)
    assert whole[-1] < whole[0] / 2


@pytest.mark.extended
@pytest.mark.parametrize("cut", ["tensor", "pipeline"])
def test_two_replicas_of_two_train_a_transformer(start_server, start_python, cut):
    job = start_job(start_server, start_python, "model_parallel.py", "--cut", cut, "--steps", "12")
    outputs = job.ended_well()

    told = [re.findall(r"update.* (\d\.\d+) bits/char", output) for output in outputs]
    # Knowing nothing takes 7 bits. A replica that comes late begins with what the other has learnt.
    assert all(float(said[-1]) < 5.5 for said in told[::2]), outputs


def test_two_replicas_of_two_train_patches_and_count_traffic(start_server, start_python):
    job = start_job(start_server, start_python, "patches.py", "--epochs", "4")
    output = "".join(job.ended_well())

    accuracies = [float(share) for share in re.findall(r"held-out accuracy (0\.\d+|1\.0+)", output)]
    assert len(accuracies) == 2 and min(accuracies) > 0.8, output
    # Both ways a row of 8 pixels and one of 4 channels, and 10 sums; back the row of channels alone. Its nodes have
    # 3 columns of neighbours but at the ends, and 4 channels in each.
    border = 2 * (8 + 32)
    edges = 2 * (3 * 8 - 2) * 4 * (1 + 4 + 4) + 20
    assert output.count(f"{border + 20} nodes forward, 64 gradients back; sending each node") == 2
    assert output.count(f"for every edge that it has there would take {edges}") == 2
    assert output.count("went to the same part in a minibatch: 1\n") == 2
    servers = ",".join(server.data for server in job.servers)
    evaluation = start_python("-m", "pyps", "eval", str(EXAMPLES / "patches.py"), "--once", "--servers", servers)
    assert evaluation.wait(DEADLINE) == 0, evaluation.output()
    [accuracy] = re.findall(r"accuracy (\d\.\d+)", evaluation.output())
    assert float(accuracy) > 0.8


def test_a_cut_for_another_number_of_processes_is_refused_in_a_sentence(start_python):
    script = start_python(str(EXAMPLES / "model_parallel.py"), "--cut", "tensor")

    assert script.wait() == 2
    assert "--cut tensor does not go with 1 processes a replica" in script.output()


def start_job(start_server: Start, start_python: StartPython, example: str, *arguments: str) -> ReplicaJob:
    servers = serve(start_server, 2, replicas=2)
    return ReplicaJob(start_python, servers, *arguments, script=str(EXAMPLES / example), replicas=2)
