"""benchmarks/local_training.py: its cases, its links, its workers and the figures of their exchanges."""

import importlib
import json
import math
import socket
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
WORKER = f"""
import io, sys
sys.path.insert(0, {str(FOLDER)!r})
import local_worker

sys.stdin = io.StringIO("go\\n")
local_worker.main()
"""


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("benchmarks.local_training")


@pytest.mark.extended
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["one process alone", "pyps hardsync float32", "pyps local nesterov int4"])
def test_the_first_worker_scores_its_model_over_time(name, start_server, start_python, benchmark):
    subject = benchmark.SUBJECTS[name]
    variant = importlib.import_module("trial").Variant(name, "tcp", subject.codec, subject.parameter_codec)
    environment = variant.environment
    if subject.way == "pyps":
        environment["PYPS_SERVERS"] = start_server("--protocol", subject.protocol).data
    words = ("--task", benchmark.TASK.name, "--subject", name, "--seconds", "5")

    worker = start_python("-c", WORKER, *words, env=environment)

    scores = worker.wait_for_output("]]\n", 120).partition("scores ")[2]
    [(start, untrained), *_, (end, trained)] = json.loads(scores)
    assert start < end
    assert untrained == pytest.approx(math.log(512), rel=0.05)
    assert trained < untrained - 1


def test_the_figures_are_those_of_the_exchanges(benchmark):
    # Two workers of 10 batches a second each for 10 s, in exchanges of 20; the loss falls by 1 in each 100 batches.
    exchanges = [(2.0 * n, 20, index) for n in range(1, 6) for index in range(2)]
    scores = [(2.0 * n, 3.3 - 0.4 * n) for n in range(6)]
    # Noise: what was reached stays so.
    scores.append((11.0, benchmark.TASK.loss + 0.1))

    figures = benchmark.summary(exchanges, scores, 5_000_000, 10.0)

    assert (figures["batches"], figures["kilobytes_a_batch"]) == (200, 50.0)
    assert figures["loss"] == scores[-1][1]
    # One process computes 100 batches in that time.
    assert figures["loss_at_batches"] == pytest.approx(2.3)
    assert figures["seconds_to_loss"] == pytest.approx((3.3 - benchmark.TASK.loss) / 0.2)


def test_a_run_without_an_exchange_of_the_first_worker_is_a_failure_and_no_end_of_all(benchmark):
    with pytest.raises(benchmark.Failed, match="no exchange in 10 s"):
        benchmark.summary([(2.0, 20, 1)], [(0.0, 6.2)], 0, 10.0)


@pytest.mark.parametrize(
    ("name", "slowed", "killed"), [("100mbit", 1, False), ("1gbit:4", 4, False), ("100mbit:killed", 1, True)]
)
def test_a_case_says_what_befalls_the_last_worker(name, slowed, killed, benchmark):
    case = benchmark.Case(name, 2)

    assert (case.slowed, case.killed) == (slowed, killed)


def test_a_packet_and_its_answer_take_the_delay_of_the_link(benchmark):
    if reason := benchmark.unavailable():
        pytest.skip(reason)
    waited = []

    def connect() -> None:
        importlib.import_module("network").enter(link.worker_namespace)
        began = time.monotonic()
        # Nobody listens there: the refusal is the answer.
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((link.server_address, 9))
        waited.append(time.monotonic() - began)

    with benchmark.Case("50mbit+100ms", 2).switch() as link:
        thread = threading.Thread(target=connect)
        thread.start()
        thread.join()

    assert waited[0] >= 0.1


def test_a_worker_that_was_killed_begins_again(benchmark, tmp_path):
    program = "echo ready; read word; echo $PYPS_WORKER_INDEX; sleep 100"
    with benchmark.Processes([["sh", "-c", program]] * 2, {}, tmp_path / "log", limit_seconds=60) as processes:
        processes.go(2, restarts=True)
        first = sorted(processes.lines.readline() for _ in range(2))

        processes.restart(1)

        assert (first, processes.lines.readline(), processes.lines.readline()) == (["0\n", "1\n"], "ready\n", "1\n")
