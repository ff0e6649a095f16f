"""A worker in its program's life, and how its end reaches the program's user and the other workers."""

import gc
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections import deque

import psutil
import pytest
import torch

from client_support import gradients_like, make_client, small_model
from pyps_client import Observer, ServerUnavailable, lease, leave
from pyps_client import worker as session
from support import checksums, child_environment, wait_until, workers_of
from training import joined

# What a wait for the lease would last; nobody may wait for it.
LEASE_SECONDS = 300.0
FLAGS = ("--run-id", "shared", "--expected-workers", "2", "--lease-seconds", str(LEASE_SECONDS))

# It pushes once, or so often that it has to wait for another worker, and then ends as it is told to.
WORKER = """
import sys
from client_support import gradients_like, make_client, small_model

client = make_client(sys.argv[1], worker_id="ends", run_id="shared")
for step in range(int(sys.argv[2])):
    client.push(gradients_like(small_model(), step), examples=1)
    client.pull()
print("done", flush=True)
"""

OVERLAPPED = """
import sys, torch
from pyps_client import Launch, RemoteOptimizer

torch.set_num_threads(1)
model = torch.nn.Linear(4, 2)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = RemoteOptimizer(model, sgd, launch=Launch(sys.argv[1], worker_id="ends", run_id="shared"), overlap="step")
optimizer.join()
print("joined", flush=True)
while True:
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
"""

UNNAMED = {
    "client": 'import numpy as np\nfrom pyps_client import Client\nClient({"w": np.zeros(3, np.float32)})\n',
    "observer": "from pyps_client import Observer\n\nObserver()\n",
    "optimizer": "import torch; from pyps_client import RemoteOptimizer; m = torch.nn.Linear(1, 1)\n\n"
    "RemoteOptimizer(m, torch.optim.SGD(m.parameters(), lr=0.1)).join()\n",
}


@pytest.mark.parametrize("protocol", ["hardsync", "serial"])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143)])
def test_a_signalled_worker_leaves(start_server, start_python, protocol, number, status):
    server = start_server("--protocol", protocol, *FLAGS)
    ended = start_python("-c", WORKER, server.data, "1000")
    with make_client(server.data, worker_id="stays", run_id="shared") as client:
        client.push(gradients_like(small_model(), 0), examples=1)
        client.pull()
        # It waits for the next round, or for its turn, which this worker holds up.
        wait_until(lambda: workers_of(server.control)["ends"].waits_for, what="the other's wait")

        ended.signal(number)

        assert ended.wait() == status, ended.output()
        began = time.monotonic()
        for seed in range(2):
            client.push(gradients_like(small_model(), seed), examples=1)
            client.pull()
        assert time.monotonic() - began < LEASE_SECONDS / 3
    assert workers_of(server.control)["ends"].state == "failed"
    assert workers_of(server.control)["ends"].message in ("KeyboardInterrupt: ", "Terminated: SIGTERM")


def test_sigterm_ends_an_optimizer_whose_threads_wait(start_server_process, start_python):
    server = start_server_process(*FLAGS[:2])
    ended = start_python("-c", OVERLAPPED, server.data)
    wait_until(
        lambda: (seen := workers_of(server.control)) and seen["ends"].tally.pushes_applied, what="its first push"
    )
    server.signal(signal.SIGSTOP)
    try:
        worker, used = psutil.Process(ended.pid), deque[object](maxlen=20)

        def waits() -> bool:
            used.append(worker.cpu_times())
            return len(used) == used.maxlen and len(set(used)) == 1

        wait_until(waits, what="all its threads to wait")
        ended.signal(signal.SIGTERM)

        assert ended.wait(30) == 143, ended.output()
        assert "Traceback" not in ended.output()
    finally:
        server.signal(signal.SIGCONT)


def test_what_a_signal_s_handler_raises_does_not_cut_a_leave_off(start_server, monkeypatch):
    server, raised = start_server(), threading.Event()

    def of_a_loader(number, frame):
        raised.set()
        raise RuntimeError("a process of the loader has died")

    before = signal.signal(signal.SIGUSR1, of_a_loader)
    try:
        client = make_client(server.data, worker_id="ends")
        servers = client.session._servers
        give_up = servers.give_up

        def amid_the_leave():
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
            assert raised.wait(60)
            give_up()

        monkeypatch.setattr(servers, "give_up", amid_the_leave)
        with pytest.raises(RuntimeError, match="of the loader"):
            client.close()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert workers_of(server.control)["ends"].state == "finished"


def test_a_forked_child_ends_by_sigterm_as_usual(start_server, start_python):
    server = start_server()
    code = (
        "import os, signal, sys\n"
        "from client_support import make_client\n"
        "client = make_client(sys.argv[1], worker_id='parent')\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    os._exit(9)\n"
        "print('child ended with', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)\n"
    )
    process = start_python("-c", code, server.data)
    assert process.wait() == 0, process.output()
    assert "child ended with -15" in process.output()
    assert workers_of(server.control)["parent"].state == "finished"


@pytest.mark.parametrize(
    ("ending", "state", "status"),
    [
        ("", "finished", 0),
        ("sys.exit()", "finished", 0),
        ("sys.exit('out of data: ValueError: out of data')", "failed", 1),
        ("raise ValueError('out of data')", "failed", 1),
        ("with client: raise ValueError('out of data')", "failed", 1),
    ],
)
def test_a_worker_says_how_it_ended(start_server, start_python, ending, state, status):
    server = start_server()
    worker = start_python("-c", f"{WORKER}\n{ending}\n", server.data, "1")

    assert worker.wait(60) == status, worker.output()
    wait_until(lambda: "worker left" in server.output(), 10, "the leave in the server's log")
    line = next(line for line in server.output().splitlines() if "worker left" in line)
    assert f"worker=ends state={state}" in line
    if status:
        assert "ValueError: out of data" in line


@pytest.mark.parametrize(("overlap", "every"), [("off", 2), ("step", 1)])
def test_an_optimizer_that_ends_without_its_server_waits_for_seconds_not_for_as_long_as_amid_training(
    start_server, monkeypatch, overlap, every
):
    monkeypatch.setattr(session, "END_SECONDS", 0.3)
    server = start_server()
    model = torch.nn.Linear(4, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = joined(
        *(model, sgd, server.data), overlap=overlap, push_every=every, pull_every=every, loss_wait_seconds=60
    )
    server.stop()
    model(torch.ones(1, 4)).sum().backward()

    began = time.monotonic()
    with pytest.raises(ServerUnavailable, match="A worker that ends waits no longer"):
        optimizer.step()
        optimizer.close()

    assert time.monotonic() - began < 30


@pytest.mark.parametrize(("overlap", "transport"), [("off", "grpc"), ("step", "shm")])
def test_an_optimizer_that_ends_while_its_server_is_silent_waits_for_seconds_and_says_what_was_not_delivered(
    start_server_process, monkeypatch, overlap, transport
):
    """A stopped process keeps its connections open: a call's own deadline leaves a minute for a slow link."""
    monkeypatch.setattr(session, "END_SECONDS", 0.5)
    monkeypatch.setattr(lease, "HURRIED_SECONDS", 0.1)
    monkeypatch.setattr(lease, "LEAVE_SECONDS", 0.3)
    server = start_server_process()
    model = torch.nn.Linear(4, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = joined(*(model, sgd, server.data), overlap=overlap, push_every=2, pull_every=2, transport=transport)
    server.signal(signal.SIGSTOP)
    for _ in range(3 if overlap == "step" else 1):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    began = time.monotonic()
    with pytest.raises(ServerUnavailable, match=r"no answer.*The gradients of the last (1 of 1|3 of 3) minibatches"):
        optimizer.close()

    assert time.monotonic() - began < 30
    server.signal(signal.SIGCONT)


def test_a_program_reports_its_lost_server(start_server_process, start_python, tmp_path):
    server, flag = start_server_process(), tmp_path / "gone"
    script = OVERLAPPED.partition("while True:")[0].replace('"step"', '"off", push_every=2')
    ending = (
        "model(torch.ones(1, 4)).sum().backward(); optimizer.step(); print('stepped', flush=True)\n"
        f"import pathlib, time, pyps_client.worker\nwhile not pathlib.Path({str(flag)!r}).exists(): time.sleep(0.02)\n"
        "pyps_client.worker.END_SECONDS = 0.2\n"
    )
    worker = start_python("-c", script + ending, server.data)
    worker.wait_for_output("stepped")
    server.kill()
    flag.touch()

    assert worker.wait() == 0
    assert "Traceback" not in worker.output()
    assert "The gradients of the last 1 of 1 minibatches were not delivered." in worker.output()


def threads_of_client() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("pyps-")]


@pytest.mark.parametrize("overlap", ["off", "step"])
def test_a_collected_optimizer_pushes_what_it_gathered_and_leaves(start_server, overlap):
    server = start_server()
    model = torch.nn.Linear(4, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = joined(*(model, sgd, server.data), worker_id="left", overlap=overlap, push_every=2, pull_every=2)
    its_session = weakref.ref(optimizer.stepper.session)
    # A scheduler and its optimizer hold each other.
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    scheduler.step()

    del optimizer, scheduler
    gc.collect()

    wait_until(lambda: workers_of(server.control)["left"].state == "finished", what="its leave")
    wait_until(lambda: not threads_of_client(), what="the end of its threads")
    wait_until(lambda: gc.collect() >= 0 and its_session() is None, what="the end of its session")
    assert checksums(server.control)[0][0] == 1, "what had gathered was pushed"
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert torch.isfinite(model.weight).all()


def test_an_optimizer_that_its_own_model_holds_ends_with_the_model(start_server):
    server = start_server()
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    # As a trainer's module does, or part of one.
    model[0].optimizer = joined(model, sgd, server.data, worker_id="left", buffers="average")
    its_optimizer = weakref.ref(model[0].optimizer)
    model(torch.eye(4)).sum().backward()
    model[0].optimizer.step()

    del model, sgd
    gc.collect()

    assert its_optimizer() is None
    wait_until(lambda: workers_of(server.control)["left"].state == "finished", what="its leave")


def test_a_client_that_nobody_holds_leaves_the_run(start_server):
    server = start_server()
    client = make_client(server.data, worker_id="left")
    client.push(gradients_like(small_model(), 0))

    del client

    wait_until(lambda: workers_of(server.control)["left"].state == "finished", what="its leave")
    wait_until(lambda: not threads_of_client(), what="the end of its threads")
    wait_until(lambda: not leave._leaving, what="the end of all that was kept of it")


@pytest.mark.parametrize("ending", ["", "raise ValueError('out of data')"])
def test_an_optimizer_local_to_main_leaves(start_server, start_python, ending):
    server = start_server()
    script = textwrap.indent(OVERLAPPED.partition("while True:")[0], "    ")
    step = "    model(torch.ones(1, 4)).sum().backward(); optimizer.step()"
    worker = start_python("-c", f"def main():\n{script}{step}\n    {ending}\nmain()\n", server.data)

    assert worker.wait() == bool(ending), worker.output()
    assert workers_of(server.control)["ends"].state == ("failed" if ending else "finished")
    assert checksums(server.control)[0][0] == 1


def test_an_observer_reads_without_counting_as_a_worker(start_server):
    server = start_server()
    with make_client(server.data) as client, Observer(server.data) as observer:
        client.push(gradients_like(small_model(), 0))
        expected = client.pull()
        snapshot = observer.snapshot()

        assert list(snapshot) == list(expected)
        for name, tensor in expected.items():
            assert (snapshot[name] == tensor).all()
            assert snapshot[name].shape == tensor.shape
        assert observer.global_step == 1
        assert observer.run_id == client.session.run_id
        receipts = client.push(gradients_like(small_model(), 1))
        assert {receipt.num_workers for receipt in receipts} == {1}
        assert observer.snapshot()["embed"][0, 0] != snapshot["embed"][0, 0]


def test_without_torch_the_optimizer_says_what_to_install_and_the_rest_works():
    code = """
import sys
sys.modules["torch"] = None
import pyps_client
pyps_client.Client, pyps_client.Observer
try:
    pyps_client.RemoteOptimizer
except ImportError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=child_environment(), capture_output=True, text=True, check=True
    )

    assert "pip install 'torch>=2.4'" in done.stdout


@pytest.mark.parametrize("kind", UNNAMED)
def test_a_script_without_servers_ends_in_a_sentence(start_python, tmp_path, kind):
    script = tmp_path / "train.py"
    script.write_text(UNNAMED[kind], encoding="utf-8")
    process = start_python(str(script))

    assert process.wait() == 1
    first, second = process.output().splitlines()
    assert first.startswith("pyps: ")
    assert "PYPS_SERVERS" in first
    assert second == f"  at {script}:3"


# A worker that says what of its process is changed.
LOOKS = """
import logging, signal, sys
before = sys.excepthook, sys.exit, signal.getsignal(signal.SIGTERM), logging.getLogger("pyps.client").handlers[:]
import pyps_client
{call}
tensors = {{"w": __import__("numpy").zeros(3, "f4")}}
client = pyps_client.Client(tensors, launch=pyps_client.Launch(sys.argv[1], worker_id="w"))
after = sys.excepthook, sys.exit, signal.getsignal(signal.SIGTERM), logging.getLogger("pyps.client").handlers[:]
print([one == other for one, other in zip(before, after)])
raise {error}
"""


def test_a_client_leaves_the_process_as_it_is_and_reports_its_end(start_server, start_python):
    server = start_server()
    code = LOOKS.format(call="", error="ValueError('out of data')")
    process = start_python("-c", code, server.data, env={"PYPS_PROCESS_HOOKS": None})

    assert process.wait() == 1
    assert process.output().startswith("[True, True, True, True]\nTraceback")
    worker = workers_of(server.control)["w"]
    assert (worker.state, worker.message) == ("failed", "ValueError: out of data")


@pytest.mark.parametrize(("call", "asked"), [("pyps_client.install_process_hooks()", None), ("", "1")])
def test_process_hooks_on_request(start_server, start_python, call, asked):
    server = start_server()
    code = LOOKS.format(call=call, error="SystemExit('out of data')").replace("raise SystemExit", "sys.exit")
    process = start_python("-c", code, server.data, env={"PYPS_PROCESS_HOOKS": asked})

    assert process.wait() == 1
    lines = process.output().splitlines()
    assert any(line.startswith("pyps: w joined run") for line in lines)
    assert "[False, False, False, False]" in lines
    worker = workers_of(server.control)["w"]
    assert (worker.state, worker.message) == ("failed", "SystemExit: out of data")


@pytest.mark.skipif(sys.version_info < (3, 12), reason="nothing hears of a raised SystemExit")
@pytest.mark.parametrize(
    ("error", "state"),
    [("SystemExit(3)", "failed"), ("SystemExit('out of data')", "failed"), ("SystemExit(0)", "finished")],
)
def test_a_raised_system_exit_counts_as_its_status_says(start_server, start_python, error, state):
    server = start_server()
    # One that the program catches says nothing of its end.
    code = LOOKS.format(call="try: raise SystemExit(5)\nexcept SystemExit: pass", error=error)
    process = start_python("-c", code, server.data, env={"PYPS_PROCESS_HOOKS": "1"})

    process.wait()
    assert workers_of(server.control)["w"].state == state


def test_other_errors_go_to_the_hook_that_was_there_before(start_python):
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


def test_a_second_sigterm_amid_the_first_ends_the_program_at_once(start_python):
    # Two at once come from the system where a launcher is killed.
    code = (
        "import signal; from pyps_client import leave; leave.install_where_asked(); noted = leave._handled.set\n"
        "leave._handled.set = lambda: (signal.raise_signal(signal.SIGTERM), noted())\n"
        "signal.raise_signal(signal.SIGTERM)"
    )
    assert start_python("-c", code).wait(60) == -signal.SIGTERM


def test_a_loader_s_process_that_ends_by_the_same_sigterm_raises_nothing(start_python):
    code = (
        "import os, signal; from pyps_client import leave; leave.install_where_asked()\n"
        "signal.signal(signal.SIGCHLD, lambda *_: [][0])\n"
        "if not (child := os.fork()):\n"
        "    signal.pause()\n"
        "try:\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "finally:\n"
        "    os.kill(child, signal.SIGKILL), os.waitpid(child, 0)\n"
    )
    ended = start_python("-c", code)
    assert (ended.wait(60), ended.output()) == (143, "")
