"""How a worker's program ends by an error of pyps that it does not catch: one clear sentence, and where."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support import PythonProcess, ServerThread, wait_until
from training import workers

Start = Callable[..., ServerThread]
StartPython = Callable[..., PythonProcess]

WRONG_SHAPE = """\
import sys
import numpy as np
from pyps_client import Client

client = Client({"w": np.zeros(3, np.float32)}, servers=sys.argv[1], worker_id="w")

def train():
    client.push({"w": np.zeros(4, np.float32)})

train()
"""

CHANGED_DECAY = """\
import sys, torch
from pyps_client import RemoteOptimizer

model = torch.nn.Linear(2, 1)
optimizer = RemoteOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), sys.argv[1], worker_id="w")
optimizer.param_groups[0]["weight_decay"] = 0.5
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
"""

OTHER_SETTINGS = """\
import sys
import numpy as np
from pyps_client import Client

Client({"w": np.zeros(3, np.float32)}, ("adagrad", {"learning_rate": 0.5, "eps": 1.0}), servers=sys.argv[1])
"""

UNNAMED = {
    "client": 'import numpy as np\nfrom pyps_client import Client\nClient({"w": np.zeros(3, np.float32)})\n',
    "observer": "from pyps_client import Observer\n\nObserver()\n",
    "optimizer": "import torch; from pyps_client import RemoteOptimizer; m = torch.nn.Linear(1, 1)\n\n"
    "RemoteOptimizer(m, torch.optim.SGD(m.parameters(), lr=0.1))\n",
}


@pytest.mark.parametrize(
    ("text", "sentence", "line"),
    [
        (WRONG_SHAPE, "pyps: The gradient of 'w' has shape [4]; expected [3].", 8),
        (CHANGED_DECAY, "pyps: weight_decay of parameter group 0 was changed from 0 to 0.5", 8),
    ],
)
def test_a_script_ends_with_the_sentence_and_its_own_line_and_leaves_as_failed(
    start_server: Start, start_python: StartPython, tmp_path: Path, text: str, sentence: str, line: int
) -> None:
    server = start_server()
    script = tmp_path / "train.py"
    script.write_text(text)
    process = start_python(str(script), server.data)

    assert process.wait() == 1
    said = process.output().splitlines()
    assert "Traceback" not in process.output()
    assert said[-2].startswith(sentence)
    assert said[-1] == f"  at {script}:{line}"
    wait_until(lambda: workers(server)["w"].state == "failed", what="the worker's failure on the server")


@pytest.mark.parametrize(("kind", "line"), [("client", 3), ("observer", 3), ("optimizer", 3)])
def test_a_script_that_names_no_servers_ends_with_the_sentence(
    start_python: StartPython, tmp_path: Path, kind: str, line: int
) -> None:
    script = tmp_path / "train.py"
    script.write_text(UNNAMED[kind])
    process = start_python(str(script))

    assert process.wait() == 1
    first, second = process.output().splitlines()
    assert first.startswith("pyps: ")
    assert "PYPS_SERVERS" in first
    assert second == f"  at {script}:{line}"


def test_a_message_of_several_lines_stays_readable(start_server: Start, start_python: StartPython) -> None:
    server = start_server("--optimizer", "adagrad:learning_rate=0.05,eps=1e-10")
    process = start_python("-c", OTHER_SETTINGS, server.data)

    assert process.wait() == 1
    output = process.output()
    assert "Traceback" not in output
    assert "\\n" not in output
    assert any("learning_rate" in line and "0.5" in line for line in output.splitlines())
    assert output.splitlines()[-1] == "  at <string>:5"
    assert not workers(server)


def test_the_traceback_comes_when_asked_for(start_python: StartPython) -> None:
    process = start_python("-c", UNNAMED["observer"], env={"PYPS_TRACEBACK": "1"})

    assert process.wait() == 1
    assert process.output().startswith("Traceback")
    assert "BadRequest: " in process.output()


def test_other_errors_go_to_the_hook_that_was_there_before(start_python: StartPython) -> None:
    text = (
        "import sys\n"
        "sys.excepthook = lambda kind, error, trace: print('mine:', error)\n"
        "from pyps_client import Observer, PypsError\n"
        "for _ in range(2):\n"
        "    try: Observer()\n"
        "    except PypsError: print('refused')\n"
        "raise ValueError('out of data')\n"
    )
    process = start_python("-c", text)

    assert process.wait() == 1
    assert process.output() == "refused\nrefused\nmine: out of data\n"
