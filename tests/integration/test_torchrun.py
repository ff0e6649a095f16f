"""Workers that torchrun starts: each of its processes, or all of them together by DistributedDataParallel."""

import re
from pathlib import Path

import pytest
import torch

from replicas import RUN_ID, ReplicaJob, serve
from support import status_of, workers_of

SCRIPT = str(Path(__file__).resolve().parent.parent / "torchrun_script.py")


@pytest.mark.extended
def test_each_process_of_torchrun_is_a_worker_with_its_own_part_of_the_data(start_server, start_python):
    server = start_server()
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT, "each", server.data)
    process = start_python(*command, env={"PYPS_RUN_ID": RUN_ID})
    assert process.wait(60) == 0, process.output()
    assert "read [0, 2, 4, 6]" in process.output()
    assert "read [1, 3, 5, 7]" in process.output()
    assert len(workers_of(server.control)) == 2
    assert status_of(server).version_max == 8


def test_ddp_needs_a_replica(start_server, start_python):
    (server,) = serve(start_server, 1)
    output = "".join(ReplicaJob(start_python, [server], "ddp", server.data, script=SCRIPT).ended_well())
    assert output.count("refused: The model is a DistributedDataParallel") == 6
    torch.manual_seed(0)
    before = torch.nn.Linear(4, 2).weight[0, 0].item()
    # Each step moves by the mean of both ranks' gradients, once: 0.5, 2.5, 4.5, 6.5.
    found = [float(number) for number in re.findall(r"weight (\S+)", output)]
    assert found == [pytest.approx(before - 0.1 * 14, abs=2e-4)] * 2
    assert status_of(server).version_max == 4
