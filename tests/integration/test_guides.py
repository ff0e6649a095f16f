"""The commands of the guides, run in the order in which their pages show them."""

import contextlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file

from client_support import gradients_like, make_client, small_model
from pyps_client import Launch, RemoteOptimizer
from support import ROOT, PythonProcess, shell, status_of
from training import joined


def blocks(page: str) -> list[str]:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    return [block for kind, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S) if not kind]


def commands(block: str) -> Iterator[list[str]]:
    for line in block.splitlines():
        if line.startswith("pyps "):
            yield shlex.split(line)[1:]


def variables(block: str) -> dict[str, str]:
    return dict(re.findall(r"(PYPS_\w+|OMP_\w+)=(\S+)", block))


def test_a_run_is_changed_stopped_and_forgotten(start_server):
    server = start_server("--run-id", "digits")
    [block] = blocks("change")
    protocol, rate, stop, reset = commands(block.replace("127.0.0.1:7610", server.data))
    with make_client(server.data) as client:
        client.push(gradients_like(small_model(), seed=1))

        shell(*protocol)
        shell(*rate)

        status = status_of(server)
        assert (status.protocol, status.staleness) == ("hardsync", "none")
        assert [each.base for each in status.learning_rates] == pytest.approx([0.01])
        shell(*stop)
        assert "finished" in shell("status", "--servers", server.data)
    shell(*reset)
    assert status_of(server).num_shards == 0


def test_a_model_is_saved_and_exported(start_server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    server = start_server("--checkpoint-dir", str(tmp_path / "checkpoints"))
    pages = [block for block in blocks("keep") if block.startswith(("pyps save", "pyps export"))]
    with make_client(server.data) as client:
        client.push(gradients_like(small_model(), seed=1))
        for command in commands("".join(pages).replace("127.0.0.1:7610", server.data)):
            (tmp_path / "model.safetensors").unlink(missing_ok=True)
            shell(*command)
            if "model.safetensors" in command:
                exported, pulled = load_file("model.safetensors"), client.snapshot()
                assert exported.keys() == pulled.keys()
                assert all((exported[name] == pulled[name]).all() for name in pulled)


@pytest.mark.extended
def test_a_job_goes_on_from_its_checkpoints(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    updates = []
    for command in commands(blocks("keep")[0]):
        with PythonProcess("-m", "pyps", *command, cwd=tmp_path) as job:
            assert job.wait(200) == 0, job.output()
            updates.append(max(int(update) for update in re.findall(r"update (\d+): loss", job.output())))
    assert updates[1] > 1.5 * updates[0]


@pytest.mark.extended
def test_own_scripts_train_together(start_server, start_python, tmp_path):
    shutil.copy(ROOT / "examples" / "minimal.py", tmp_path / "train.py")
    serving, working = (block for block in blocks("quickstart") if "--run-id mine" in block or "train.py" in block)
    [[_, *flags]] = commands(serving)
    server = start_server(*flags)
    env = variables(working) | {"PYPS_SERVERS": server.data}

    workers = [start_python("train.py", cwd=tmp_path, env=env | {"PYPS_WORKER_INDEX": index}) for index in "01"]

    assert [worker.wait() for worker in workers] == [0, 0]
    assert status_of(server).run_id == "mine"


@pytest.mark.extended
def test_a_model_is_simulated(tmp_path, monkeypatch):
    text = (ROOT / "docs" / "simulate.md").read_text(encoding="utf-8")
    example = (ROOT / "examples" / "simulated_digits.py").read_text(encoding="utf-8")
    assert f"```python\n{example}```" in text
    first, *_ = commands("".join(blocks("simulate")).replace("\\\n", ""))
    # It draws the picture, too.
    assert shlex.join(first) in (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n\t\t", "")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")

    said = shell(*first, "--epochs", "1", "--seeds", "1")

    rows = r"^ (\S+) +(\w+) +([\d.]+) +0\.\d"
    assert len(re.findall(rows, text, re.M)) == 6
    assert re.findall(rows, said, re.M) == re.findall(rows, text, re.M)


def test_a_loop_of_ones_own_accumulates_clips_schedules_and_evaluates(start_server):
    x, y = torch.randn(8, 4), torch.randn(8, 2)
    model, losses = torch.nn.Linear(4, 2), []
    names = {"torch": torch, "model": model, "twin": torch.nn.Linear(4, 2), "first": True}
    names["optimizer"] = joined(model, torch.optim.SGD(model.parameters(), lr=0.1), servers=start_server().data)
    names["four_batches"] = lambda: [(x, y)] * 4
    names["evaluate"] = lambda twin: losses.append(float((twin(x) - y).square().mean().detach()))
    with contextlib.closing(names["optimizer"]):
        exec(blocks("trainers")[-2], names)
    assert len(losses) == 100
    assert losses[-1] < losses[0]


def test_optimizers_that_take_turns_are_runs_of_their_own(start_server):
    loop = blocks("trainers")[-1]
    servers = {name: start_server("--run-id", name) for name in ("maker", "judge")}
    for server, port in zip(servers.values(), (7610, 7620), strict=True):
        loop = loop.replace(f"127.0.0.1:{port}", server.data)
    names = {"torch": torch, "RemoteOptimizer": RemoteOptimizer, "Launch": Launch, "loader": [torch.randn(8, 4)] * 3}
    names |= {"maker": torch.nn.Linear(3, 4), "judge": torch.nn.Linear(4, 1), "noise": lambda: torch.randn(8, 3)}
    names |= {"ones": torch.ones(8, 1), "zeros": torch.zeros(8, 1)}
    names["bce"] = torch.nn.functional.binary_cross_entropy_with_logits
    try:
        exec(loop, names)
    finally:
        for name in servers:
            names[f"of_{name}"].close()
    assert [status_of(server).version_max for server in servers.values()] == [3, 3]


@pytest.mark.extended
@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl, by which the page makes a token, is not installed")
def test_two_machines_train(start_server, start_python, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    making, serving, working, stopping = blocks("machines")[:4]
    # The two machines are this one, by two names.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    subprocess.run(
        ["bash", "-ec", making.replace("first-host", "localhost").replace("second-host", "127.0.0.1")],
        check=True,
        capture_output=True,
    )
    # One of the four workers is enough here.
    alone = serving.replace("--expected-workers 4", "--expected-workers 1")
    [[_, *flags]] = commands(alone.replace("0.0.0.0", "127.0.0.1"))
    servers = [start_server(*flags, env=variables(serving)) for _ in range(2)]
    first, second = (server.data.rpartition(":")[2] for server in servers)
    script = working.split("python ")[1].split()
    env = variables(working) | {"PYPS_SERVERS": f"localhost:{first},127.0.0.1:{second}"}

    worker = start_python(*script, "--epochs", "2", cwd=tmp_path, env=env)

    assert worker.wait() == 0
    assert "joined run digits" in worker.output()
    for server in servers:
        monkeypatch.setenv("PYPS_CONTROL", server.control)
        subprocess.run(["bash", "-ec", stopping], check=True, capture_output=True)
