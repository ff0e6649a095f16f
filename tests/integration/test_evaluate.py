"""`pyps eval` and `pyps health` against real servers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import pyps_client
from support import PythonProcess, ServerProcess

Start = Callable[..., PythonProcess]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script that scores parameters by their mean."""
    path = tmp_path / "score.py"
    path.write_text("def evaluate(parameters):\n    return {'mean': parameters['w'].mean()}\n")
    return path


def test_a_snapshot_of_a_running_model_is_scored(
    start_server_process: Callable[..., ServerProcess], start_python: Start, script: Path
) -> None:
    server = start_server_process()
    with pyps_client.Client({"w": np.full(100, 2.5, np.float32)}, servers=server.data):
        evaluation = start_python("-m", "pyps", "eval", str(script), "--servers", server.data, "--once")

        assert evaluation.wait() == 0
    assert evaluation.output() == "update 0  mean 2.5\n"


def test_evaluation_goes_on_until_the_servers_are_gone(
    start_server_process: Callable[..., ServerProcess], start_python: Start, script: Path
) -> None:
    server = start_server_process()
    with pyps_client.Client({"w": np.zeros(100, np.float32)}, servers=server.data):
        flags = ("--servers", server.data, "--every", "0.2")
        evaluation = start_python("-m", "pyps", "eval", str(script), *flags)
        evaluation.wait_for_output("update 0  mean 0\nupdate 0  mean 0\n")
    server.terminate()

    assert evaluation.wait() == 0
    assert evaluation.output().endswith("The servers are gone: the run has ended.\n")


def test_a_script_without_evaluate_is_refused_in_a_sentence(start_python: Start, tmp_path: Path) -> None:
    script = tmp_path / "empty.py"
    script.touch()

    evaluation = start_python("-m", "pyps", "eval", str(script))

    assert evaluation.wait() == 2
    assert "empty.py defines no function evaluate(parameters)." in evaluation.output()
    assert "Traceback" not in evaluation.output()


def test_health_tells_a_serving_server_from_none(
    start_server_process: Callable[..., ServerProcess], start_python: Start
) -> None:
    server = start_server_process()
    healthy = start_python("-m", "pyps", "health", "--servers", f"{server.data},{server.control}")
    assert healthy.wait() == 0
    assert healthy.output().count("SERVING") == 2
    server.terminate()

    gone = start_python("-m", "pyps", "health", "--servers", server.data)

    assert gone.wait() == 1
    assert f"{server.data} UNAVAILABLE" in gone.output()


def test_an_error_in_the_users_script_is_shown_from_its_own_lines(
    start_server_process: Callable[..., ServerProcess], start_python: Start, tmp_path: Path
) -> None:
    path = tmp_path / "broken.py"
    path.write_text("def evaluate(parameters):\n    return parameters['missing']\n")
    server = start_server_process()
    with pyps_client.Client({"w": np.zeros(100, np.float32)}, servers=server.data):
        evaluation = start_python("-m", "pyps", "eval", str(path), "--servers", server.data, "--once")

        assert evaluation.wait() == 1
    assert "line 2, in evaluate" in evaluation.output()
    assert "pyps/cli" not in evaluation.output()
    assert evaluation.output().endswith("failed with the error above.\n")


def test_a_script_that_is_no_python_is_shown_with_its_line(start_python: Start, tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("def evaluate(:\n")

    evaluation = start_python("-m", "pyps", "eval", str(path), "--once")

    assert evaluation.wait() == 1
    assert "SyntaxError" in evaluation.output()
    assert "pyps/cli" not in evaluation.output()
