from pathlib import Path

import numpy as np
import pytest

import pyps_client
from support import PythonProcess, StartPython, shell


@pytest.fixture
def evaluation(start_python: StartPython, tmp_path: Path) -> StartPython:
    path = tmp_path / "score.py"

    def start(text: str, *flags: str) -> PythonProcess:
        path.write_text(text, encoding="utf-8")
        return start_python("-m", "pyps", "eval", str(path), *flags)

    return start


MEAN = "def evaluate(parameters):\n    return {'mean': parameters['w'].mean()}\n"


def test_eval_scores_snapshots_until_the_servers_end(start_server, evaluation):
    server = start_server()
    with pyps_client.Client({"w": np.full(100, 2.5, np.float32)}, servers=server.data):
        once = evaluation(MEAN, "--servers", server.data, "--once")
        assert once.wait() == 0
        often = evaluation(MEAN, "--servers", server.data, "--every", "0.2")
        often.wait_for_output("update 0  mean 2.5\nupdate 0  mean 2.5\n")
    assert once.output() == "update 0  mean 2.5\n"
    server.stop()

    assert often.wait() == 0
    assert often.output().endswith("The servers are gone: the run has ended.\n")


def test_a_script_without_a_score_is_quoted(start_server, evaluation):
    server = start_server()
    cases = (
        ("", 2, "score.py defines no function evaluate(parameters)."),
        ("def evaluate(:\n", 1, "SyntaxError"),
        ("def evaluate(parameters):\n    return parameters['missing']\n", 1, "line 2, in evaluate"),
    )
    with pyps_client.Client({"w": np.zeros(100, np.float32)}, servers=server.data):
        for text, status, words in cases:
            ended = evaluation(text, "--servers", server.data, "--once")
            assert ended.wait() == status, ended.output()
            assert words in ended.output()
            assert "pyps/cli" not in ended.output()
    assert ended.output().endswith("failed with the error above.\n")


def test_health_calls_the_servers_that_the_environment_names_and_reports_lost_ones(start_server):
    server = start_server()
    for variable, address in (("PYPS_SERVERS", server.data), ("PYPS_CONTROL", server.control)):
        assert shell("health", **{variable: address}) == f"{address} SERVING\n"
    server.stop()
    assert f"{server.data} UNAVAILABLE" in shell("health", "--servers", server.data, status=1)
