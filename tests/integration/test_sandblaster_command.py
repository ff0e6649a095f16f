"""`pyps sandblaster`: servers, coordinator and workers of one job, by one command."""

import re
import signal

import psutil
import pytest
import torch

from sandblaster import END_SECONDS, SCRIPT
from support import PythonProcess, wait_until


def coordinator_of(launcher: PythonProcess) -> psutil.Process | None:
    children = psutil.Process(launcher.pid).children()
    return next((child for child in children if "coordinate" in _command_line(child)), None)


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def test_a_killed_coordinator_is_started_again(start_python, tmp_path):
    go = tmp_path / "go"
    hold = ("--hold-at", "70", "--release", str(go))
    flags = ("--servers", "2", "--iterations", "6", "--portions", "8")
    launcher = start_python("-m", "pyps", "sandblaster", *flags, str(SCRIPT), *hold)
    launcher.wait_for_output("worker-0    | held", END_SECONDS)
    coordinator = coordinator_of(launcher)

    coordinator.send_signal(signal.SIGKILL)
    launcher.wait_for_output(
        "coordinator was killed by SIGKILL: another one goes on from the last iteration.", END_SECONDS
    )
    go.touch()

    assert launcher.wait(END_SECONDS) == 0, launcher.output()
    output = launcher.output()
    assert [int(number) for number in re.findall(r"\| iteration +(\d+)  loss ", output)] == [1, 2, 3, 4, 5, 6]
    assert re.search(r"^coordinator \| ended after 6 iterations and 7 passes, loss ", output, re.M)
    assert re.search(r"^worker-0    \| bits ", output, re.M)


@pytest.mark.parametrize("servers", [1, 2])
def test_a_replica_takes_the_iterations_of_a_worker_of_one_process(start_python, tmp_path, servers):
    """The paper's second half on its first; on one server shards of both parts lie together."""
    losses, models = [], []
    for parts in (1, 2):
        saved = tmp_path / str(parts)
        flags = ("--servers", str(servers), "--iterations", "4", "--portions", "6", "--parts", str(parts))
        job = start_python("-m", "pyps", "sandblaster", *flags, str(SCRIPT), "--save", str(saved))
        assert job.wait(END_SECONDS) == 0, job.output()
        losses.append([float(loss) for loss in re.findall(r"\| iteration +\d+  loss ([0-9.]+)", job.output())])
        models.append(torch.cat([values.reshape(-1) for values in torch.load(saved)]))

    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    # Sums over the processes are made in another order, and L-BFGS carries that on.
    assert 0 < (models[1] - models[0]).norm() / models[0].norm() < 1e-4


def test_workers_that_all_fail_end_the_job_at_once(start_python):
    launcher = start_python("-m", "pyps", "sandblaster", "--workers", "2", "--", "python", "-c", "raise SystemExit(3)")

    assert launcher.wait(END_SECONDS) == 1
    assert "worker-1 ended with status 3" in launcher.output()


def test_one_interrupt_ends_the_whole_job(start_python):
    waiting = "import signal; print('waits', flush=True); signal.pause()"
    launcher = start_python("-m", "pyps", "sandblaster", "--workers", "1", "--", "python", "-c", waiting)
    launcher.wait_for_output("worker-0    | waits", END_SECONDS)
    wait_until(lambda: coordinator_of(launcher), what="a coordinator")
    everybody = psutil.Process(launcher.pid).children(recursive=True)
    assert len(everybody) == 3

    launcher.signal(signal.SIGINT)

    assert launcher.wait(END_SECONDS) == 128 + signal.SIGINT
    wait_until(lambda: not any(process.is_running() for process in everybody), what="the end of all processes")
    assert "another one goes on" not in launcher.output()


@pytest.mark.extended
def test_a_checkpointed_job_goes_on_where_it_ended(start_python, tmp_path):
    command = ("-m", "pyps", "sandblaster", "--portions", "8", "--checkpoint-dir", str(tmp_path / "kept"))
    first = start_python(*command, "--iterations", "2", str(SCRIPT))
    assert first.wait(END_SECONDS) == 0, first.output()

    second = start_python(*command, "--iterations", "4", "--resume", str(SCRIPT))

    assert second.wait(END_SECONDS) == 0, second.output()
    assert [int(number) for number in re.findall(r"\| iteration +(\d+)  loss ", second.output())] == [3, 4]


def test_what_cannot_be_used_is_refused_before_anything_is_started(start_python):
    for flags, sentence in (
        (("--fold", "whole"), "--fold is 'whole'; expected portion, or group:k=4"),
        (("--line-search", "golden"), "--line-search is 'golden'; expected armijo or wolfe"),
        (("--resume",), "--resume needs a folder to resume from"),
    ):
        launcher = start_python("-m", "pyps", "sandblaster", *flags, str(SCRIPT))
        assert launcher.wait() == 2
        assert sentence in launcher.output()
    missing = start_python("-m", "pyps", "sandblaster", "nowhere.py")
    assert missing.wait() == 2
    assert "there is no script nowhere.py" in missing.output()


@pytest.mark.extended
def test_a_job_goes_on_for_a_coordinator_that_was_started_by_hand(start_python, tmp_path):
    go = tmp_path / "go"
    flags = ("--iterations", "6", "--portions", "8")
    hold = ("--hold-at", "20", "--release", str(go))
    launcher = start_python("-m", "pyps", "sandblaster", "--servers", "2", *flags, str(SCRIPT), *hold)
    launcher.wait_for_output("worker-0    | held", END_SECONDS)
    servers = re.search(r"pyps export FILE --servers (\S+)", launcher.output())
    assert servers is not None, launcher.output()

    newer = start_python("-m", "pyps", "coordinate", "--servers", servers[1], *flags)
    launcher.wait_for_output("coordinator was replaced by another one", END_SECONDS)
    go.touch()

    assert newer.wait(END_SECONDS) == 0, newer.output()
    assert "ended after 6 iterations" in newer.output()
    assert launcher.wait(END_SECONDS) == 0, launcher.output()
