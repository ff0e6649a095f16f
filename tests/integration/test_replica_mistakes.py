"""What one process of a replica does wrong is told to people once, in a sentence, and by all of its processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support import PythonProcess

Start = Callable[..., PythonProcess]
SCRIPT = str(Path(__file__).resolve().parents[1] / "replica_mistakes.py")
DEADLINE = 300.0


def run(start_python: Start, case: str) -> PythonProcess:
    return start_python("-m", "pyps", "run", "--servers", "2", "--parts", "2", "--", "python", SCRIPT, case)


def lines_of(output: str, process: str) -> list[str]:
    pairs = [line.partition(" | ") for line in output.splitlines()]
    return [text for name, _, text in pairs if name.strip() == process]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("optimizer", "The optimizer's rule is sgd in process 0 of the replica, but adagrad in process 1"),
        ("rate", "'learning_rate': 0.1"),
        ("unsupported", "Adadelta"),
        ("foreign parameter", "is not a parameter of the model"),
        ("pace", "push_every"),
        ("no replica", "give RemoteOptimizer replica=Replica()"),
    ],
)
def test_a_mistake_of_one_process_is_refused_by_all_in_the_same_words(start_python, case, words):
    job = run(start_python, case)
    assert job.wait(DEADLINE) == 1, job.output()
    output = job.output()
    for process in ("replica-0.0", "replica-0.1"):
        assert [line for line in lines_of(output, process) if words in line], output
    assert "Traceback" not in output
    # Nothing was founded.
    assert "initialising" not in output


def test_numbers_that_float32_cannot_hold_are_left_out_by_all_and_one_process_reads_the_whole_model(start_python):
    job = run(start_python, "float64")
    assert job.wait(DEADLINE) == 0, job.output()
    output = job.output()
    assert output.count("left out 1") == 2, output
    assert "snapshot {'0.bias': (16,), '0.weight': (16, 8), '2.bias': (8,), '2.weight': (8, 16)}" in output
