"""The examples that cut a model over processes: they compute what the whole model does, and train on real servers."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable

import pytest

from inspection import inspect
from support import ROOT, PythonProcess

Start = Callable[..., PythonProcess]

EXAMPLES = ROOT / "examples"
TRAINING = str(ROOT / "tests" / "cut_training.py")
# For programs of several processes that share two cores with other work.
PATIENCE_SECONDS = 280
# A test waits for two of them at the most, one after the other.
pytestmark = pytest.mark.timeout(2 * PATIENCE_SECONDS + 40)


def losses(start_python: Start, *how: str, processes: int) -> list[float]:
    """What tests/cut_training.py prints, run by so many processes."""
    # It finds a free port for the processes to meet at, which no test could keep free for them.
    together = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes))
    script = start_python(*(together if processes > 1 else ()), TRAINING, *how)
    assert script.wait(PATIENCE_SECONDS) == 0, script.output()
    [line] = [line for line in script.output().splitlines() if line.startswith("[") and line.endswith("]")]
    found: list[float] = json.loads(line)
    return found


@pytest.fixture(scope="module")
def whole_transformer() -> list[float]:
    """The losses of the transformer that is not cut."""
    with PythonProcess(TRAINING, "model_parallel", "none") as script:
        assert script.wait(PATIENCE_SECONDS) == 0, script.output()
        found: list[float] = json.loads(script.output())
    return found


@pytest.mark.parametrize("cut", ["tensor", "pipeline"])
def test_a_cut_transformer_trains_as_the_whole_one(
    start_python: Start, whole_transformer: list[float], cut: str
) -> None:
    """P1: Dean et al. 2012, section 3."""
    assert losses(start_python, "model_parallel", cut, processes=2) == pytest.approx(whole_transformer, rel=1e-5)
    assert whole_transformer[-1] < whole_transformer[0] - 1


def test_bands_of_unequal_height_train_as_the_whole_network_and_send_no_node_twice(start_python: Start) -> None:
    """P1 and P2: Dean et al. 2012, section 3; three bands of eight rows, so one has neighbours on both sides."""
    whole = losses(start_python, "patches", processes=1)

    assert losses(start_python, "patches", processes=3) == pytest.approx(whole, rel=1e-5)
    assert whole[-1] < whole[0] / 2


@pytest.mark.parametrize("cut", ["tensor", "pipeline"])
def test_two_replicas_of_two_processes_train_a_transformer(start_python: Start, cut: str) -> None:
    job = start_job(start_python, "model_parallel.py", "--cut", cut, "--steps", "30")
    output = finished(job)

    for replica in ("replica-0.0", "replica-1.0"):
        *_, last = re.findall(rf"{replica} +\| .*update.* (\d\.\d+) bits/char", output)
        # Knowing nothing takes 7 bits. A replica that comes late begins with what the other has learnt.
        assert float(last) < 4.5, output
    assert_processes_keep_to_their_parts(output)
    assert job.terminate() == 0, job.output()


def test_two_replicas_of_two_processes_train_patches_and_count_what_crosses(start_python: Start) -> None:
    job = start_job(start_python, "patches.py", "--epochs", "4")
    output = finished(job)

    accuracies = [float(share) for share in re.findall(r"held-out accuracy (0\.\d+|1\.0+)", output)]
    assert len(accuracies) == 2 and min(accuracies) > 0.8, output
    # Both ways a row of 8 pixels and one of 4 channels, and 10 sums; back the row of channels alone. Its nodes have
    # 3 columns of neighbours but at the ends, and 4 channels in each.
    border = 2 * (8 + 32)
    edges = 2 * (3 * 8 - 2) * 4 * (1 + 4 + 4) + 20
    assert output.count(f"{border + 20} nodes forward, 64 gradients back; sending each node") == 2
    assert output.count(f"for every edge that it has there would take {edges}") == 2
    assert output.count("went to the same part in a minibatch: 1\n") == 2
    # The servers' model, whole, in one process.
    [servers] = re.findall(r"pyps export FILE --servers (\S+)", output)
    evaluation = start_python("-m", "pyps", "eval", str(EXAMPLES / "patches.py"), "--once", "--servers", servers)
    assert evaluation.wait(PATIENCE_SECONDS) == 0, evaluation.output()
    [accuracy] = re.findall(r"accuracy (\d\.\d+)", evaluation.output())
    assert float(accuracy) > 0.8
    assert_processes_keep_to_their_parts(output)
    assert job.terminate() == 0, job.output()


def test_a_cut_for_another_number_of_processes_is_refused_in_a_sentence(start_python: Start) -> None:
    script = start_python(str(EXAMPLES / "model_parallel.py"), "--cut", "tensor")

    assert script.wait() == 2
    assert "--cut tensor does not go with 1 processes a replica" in script.output()


def start_job(start_python: Start, example: str, *arguments: str) -> PythonProcess:
    """Two replicas of two processes on two servers, which stay to be asked."""
    script = (sys.executable, str(EXAMPLES / example), *arguments)
    sizes = ("--servers", "2", "--replicas", "2", "--parts", "2")
    return start_python("-m", "pyps", "run", "--stay", *sizes, "--", *script)


def finished(job: PythonProcess) -> str:
    """The job's output once all replicas have ended, well."""
    output = job.wait_for_output("the servers stay until Ctrl-C", PATIENCE_SECONDS)
    assert len(re.findall(r"pyps +\| .*replica-\d finished after", output)) == 2, output
    return output


def assert_processes_keep_to_their_parts(output: str) -> None:
    """P3: every process pushed and pulled the shards of its part, all of them and no others, as the servers saw it."""
    [addresses] = re.findall(r"pyps status --servers (\S+)", output)
    parts = set()
    for index, control in enumerate(addresses.split(",")):
        shards = inspect(control, "ListShards").shards
        workers = inspect(control, "ListWorkers").workers
        parts.update(shard.part for shard in shards)
        # Server 0 knows all, others those for whose part they hold shards.
        assert len(workers) == 2 * len({0, 1} if index == 0 else {shard.part for shard in shards})
        for worker in workers:
            own = [shard.shard_id for shard in shards if shard.part in worker.parts]
            assert list(worker.parts) == [int(worker.worker_id.removeprefix(f"{worker.replica}/"))], worker
            assert list(worker.shards_pushed) == list(worker.shards_pulled) == own, worker
    assert parts == {0, 1}
