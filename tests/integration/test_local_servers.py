"""`servers="local"`: a server that a worker starts for itself alone."""

import subprocess
import sys

import numpy as np
import pytest

from pyps_client import Client, Launch, Observer, local_server
from pyps_wire.errors import InvalidArgument, ServerUnavailable, UnsupportedOptimizer
from support import PythonProcess, shell, wait_until

SGD = ("sgd", {"learning_rate": 1.0})


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYPS_SERVERS", raising=False)


def ones(value: float) -> dict[str, np.ndarray]:
    return {"w": np.full(3, value, np.float32)}


def test_a_worker_has_a_server_of_its_own_until_it_leaves(monkeypatch):
    monkeypatch.setenv("PYPS_SERVERS", "local")
    monkeypatch.setenv("PYPS_PROTOCOL", "no protocol of this worker's server")
    with Client(ones(1), SGD) as first, Client(ones(5), SGD, servers=" Local") as second:
        for _ in range(2):
            newer = first.exchange(ones(0.25)), second.exchange(ones(0.25))
        assert [float(each["w"][0]) for each in newer] == [0.5, 4.5], "each trains a run of its own"
        processes = list(local_server._servers.values())
        assert len(processes) == 2
    assert not local_server._servers
    assert [process.returncode for process in processes] == [0, 0]


@pytest.mark.parametrize("transport", ["grpc", "tcp", "shm"])
def test_it_is_reached_by_the_chosen_transport_and_not_waited_for_once_killed(transport):
    with Client(ones(1), SGD, launch=Launch("local", transport=transport, tls_ca="", use_proxy=True)) as client:
        assert float(client.exchange(ones(0.5))["w"][0]) == 0.5
        assert client.session.transport == transport
        [server] = local_server._servers.values()
        server.kill()
        with pytest.raises(ServerUnavailable, match="has ended, with status -9"):
            client.exchange(ones(0.25))


def test_a_folder_named_pyps_where_the_worker_runs_is_not_taken_for_the_package(monkeypatch, tmp_path):
    (tmp_path / "pyps").mkdir()
    (tmp_path / "pyps" / "__init__.py").write_text("raise ImportError('a clone without kernels')")
    monkeypatch.chdir(tmp_path)
    with Client(ones(1), SGD, servers="local") as client:
        assert float(client.exchange(ones(0.25))["w"][0]) == 0.75
    job = ["-P", "-m", "pyps", "run", "--servers", "1", "--workers", "1", "--", sys.executable, "-c", "0"]
    assert subprocess.run([sys.executable, *job], timeout=120, check=False).returncode == 0


def test_several_processes_are_refused_a_server_of_one():
    for others in ({"worker_count": 2, "worker_index": 0}, {"parts": 2}):
        with pytest.raises(InvalidArgument, match="several processes are to share it: start `pyps serve`"):
            Launch("local", **others)
    with pytest.raises(InvalidArgument, match="several processes are to share it: start `pyps serve`"):
        Launch("local").begun(2)


def test_a_refused_client_leaves_no_server(monkeypatch, capfd):
    with pytest.raises(InvalidArgument, match="wait_seconds"):
        Client(ones(1), SGD, launch=Launch("local", wait_seconds=-1))
    with pytest.raises(UnsupportedOptimizer):
        Client(ones(1), ("no such rule", {}), servers="local")
    monkeypatch.setenv("PYPS_ISA", "none such")
    with pytest.raises(InvalidArgument, match="local server ended with status 2: its lines say why"):
        Client(ones(1), SGD, servers="local")
    assert "PYPS_ISA in the environment cannot be used" in capfd.readouterr().err
    assert not local_server._servers


def test_observers_and_commands_need_a_named_server(monkeypatch, tmp_path):
    words = "starts for itself alone: start `pyps serve`"
    with pytest.raises(InvalidArgument, match=words):
        Observer("local")
    monkeypatch.setenv("PYPS_SERVERS", "local")
    with pytest.raises(InvalidArgument, match=words):
        Observer()
    script = tmp_path / "score.py"
    script.write_text("def evaluate(parameters): return 0\n", encoding="utf-8")
    for command in (["status"], ["eval", str(script)], ["stop"], ["coordinate"]):
        assert words in shell(*command, status=2), command
    assert not local_server._servers


def test_without_the_servers_package_the_error_says_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyps", None)
    with pytest.raises(InvalidArgument, match="needs the package pyps"):
        Launch("local").begun(1)


WITHOUT_A_WORD = """
import os
import numpy as np
from pyps_client import Client

client = Client({"w": np.zeros(3, np.float32)}, ("sgd", {"learning_rate": 1.0}), servers="local")
client.exchange({"w": np.ones(3, np.float32)})
if child := os.fork():
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    client.exchange({"w": np.ones(3, np.float32)})
raise SystemExit(3)
"""


def test_a_program_may_end_without_a_word_and_so_may_a_child_that_it_forked():
    with PythonProcess("-c", WITHOUT_A_WORD) as process:
        assert process.wait() == 3
        assert all(line.startswith("pyps: ") for line in process.output().splitlines()), process.output()


KILLED = """
import os, signal
import numpy as np
from pyps_client import Client, local_server

client = Client({"w": np.zeros(3, np.float32)}, ("sgd", {"learning_rate": 1.0}), servers="local")
[server] = local_server._servers.values()
print(server.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_server_ends_with_a_worker_that_is_killed():
    with PythonProcess("-c", KILLED) as process:
        assert process.wait() == -9
        [pid] = [int(line) for line in process.output().splitlines() if line.isdecimal()]
        wait_until(lambda: _is_gone(pid), what="the server's end")


def _is_gone(pid: int) -> bool:
    """Return whether no process has that number, but for one that nobody has waited for."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return state in ("", "Z")


TRAINS_TO_THE_VERY_END = """
import atexit
import threading
import torch
from pyps_client import RemoteOptimizer

model = torch.nn.Linear(3, 1)
atexit.register(lambda: print("updates:", optimizer.global_step))
optimizer = RemoteOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), servers="local", push_every=2)
optimizer.join()

def step():
    optimizer.zero_grad()
    model(torch.ones(3)).sum().backward()
    optimizer.step()

def train():
    threading.main_thread().join()
    step()

step()
atexit.register(step)
threading.Thread(target=train).start()
"""


def test_threads_and_exit_handlers_train_to_the_very_end_and_the_last_gradients_count():
    with PythonProcess("-c", TRAINS_TO_THE_VERY_END) as process:
        assert process.wait() == 0
        assert process.output().splitlines()[-1] == "updates: 2", process.output()
