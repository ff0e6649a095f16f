"""benchmarks/training.py: every way to train takes its steps, and the figures are those of the steps."""

import importlib
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support import server_port

FOLDER = Path(__file__).parents[2] / "benchmarks"
# A model whose batches take a few milliseconds, from the start through forty steps; or its server.
TRAINING = f"""
import itertools, sys
sys.path.insert(0, {str(FOLDER)!r})
import training_worker as worker

name, address, serves = sys.argv[1:]
place = worker.Place(index=0, count=1, address=address)
task, subject = worker.TASKS["170 thousand"], worker.SUBJECTS[name]
if serves:
    worker.serve_rpc(task, subject, place)
else:
    print(*itertools.islice(worker.trained(task, subject, place), 1, 41))
    if subject.way == "rpc":
        worker.rpc.shutdown()
"""


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("benchmarks.training")


@pytest.fixture
def task(benchmark: ModuleType) -> Any:
    return benchmark.TASKS["170 thousand"]


@pytest.mark.parametrize(
    "name",
    [
        "one process alone",
        "pyps async, overlapped, bfloat16",
        "pyps hardsync, overlapped in backward, bfloat16",
        "pyps hardsync, overlapped in backward, int4",
        "pyps local training, H = 8",
        "DDP gloo, float16",
        "DDP gloo, bfloat16",
        "DDP gloo, PowerSGD rank 4",
        "torch RPC hardsync",
    ],
)
def test_every_way_to_train_takes_its_steps(name, start_server, start_python, benchmark):
    subject = benchmark.SUBJECTS[name]
    address = f"127.0.0.1:{server_port()}"
    environment = {"GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
    if subject.way == "pyps":
        environment |= benchmark.Variant(name, "tcp", subject.codec, subject.parameter_codec).environment
        environment["PYPS_SERVERS"] = start_server("--protocol", subject.protocol).data
    if subject.way == "rpc":
        start_python("-c", TRAINING, name, address, "serves", env=environment)

    training = start_python("-c", TRAINING, name, address, "", env=environment)

    assert training.wait() == 0, training.output()
    losses = [float(word) for word in training.output().splitlines()[-1].split()]
    assert len(losses) == 40
    assert losses[-1] < losses[0] - 0.2


@pytest.mark.parametrize("name", ["torchft", "Hivemind"])
def test_two_workers_of_a_peer_train_under_its_own_python(name, benchmark, task):
    subject = benchmark.SUBJECTS[name]
    if benchmark.python(subject) is None:
        pytest.skip(benchmark.peers.lacking(subject.module, benchmark.variable(subject)))

    row = benchmark.measured(subject, task, 2, link=None, slowed=1.0, transport="tcp")

    assert set(benchmark.versions(subject)) == {subject.module, "torch"}
    # How many depends on what else the machine does.
    assert row["batches"] > 1
    assert row["loss"] < 7


def test_a_peer_trains_under_its_python_or_not(benchmark, monkeypatch):
    subject = replace(benchmark.SUBJECTS["torchft"], module="no_such_module")
    assert benchmark.python(subject) is None

    monkeypatch.setenv("PEERS_PYTHON_NO_SUCH_MODULE", "/peers/bin/python")

    assert benchmark.python(subject) == "/peers/bin/python"


def test_the_tasks_models_are_of_the_size_that_their_tables_say(benchmark):
    worker = importlib.import_module("training_worker")
    for task in benchmark.TASKS.values():
        parameters = list(worker.Transformer(task).parameters())
        assert (sum(p.numel() for p in parameters), len(parameters)) == (task.params, task.keys)


def test_measuring_begins_when_all_are_ready(benchmark, task, tmp_path):
    program = "echo '[Gloo] connected'; echo ready; read word; while echo 1e9 0.5; do :; done"

    began, steps = benchmark.trained([["sh", "-c", program]] * 2, task, {}, tmp_path / "log", num_workers=2)

    assert began <= time.perf_counter()
    assert steps[0] == (1e9, 0.5)


def test_a_worker_that_dies_is_reported_with_its_last_words(benchmark, task, tmp_path):
    commands = [["sh", "-c", "echo ready; read word; echo 'out of luck' >&2; exit 3"]]

    with pytest.raises(benchmark.rounds.Failed, match=r"\[3\].*out of luck"):
        benchmark.trained(commands, task, {}, tmp_path / "log", num_workers=1)


def test_a_run_ends_with_the_stated_loss_and_enough_batches_and_is_timed_up_to_each(benchmark, task):
    steps = [(10.0 + 0.1 * n, task.loss + (0.5 if n <= 4 else -0.5)) for n in range(1, 50)]

    run = list(benchmark.until_done(task, 10.0, iter(steps)))

    assert len(run) == task.rounds
    # The mean of eight is reached with four of each.
    figures = benchmark.summary(task, 10.0, run)
    assert figures["batches_to_loss"] == 8
    assert figures["seconds_to_loss"] == pytest.approx(0.8)
    assert figures["samples_per_s"] == pytest.approx(10 * task.sequences)


def test_a_run_that_never_reaches_the_stated_loss_ends_after_its_time_without_a_figure(benchmark, task):
    steps = [(0.5 * n, task.loss + 1) for n in range(1, 50)]

    run = list(benchmark.until_done(task, 0.0, iter(steps)))

    assert run[-1][0] == pytest.approx(task.seconds + 0.5)
    assert benchmark.summary(task, 0.0, run)["seconds_to_loss"] is None
