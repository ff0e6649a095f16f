"""`pyps run` with workers of several processes: what they are told, how they fail, how they come back."""

from __future__ import annotations

import contextlib
import re
import signal
import textwrap
from collections.abc import Callable
from pathlib import Path

import psutil
from typer.testing import CliRunner

from pyps.cli.main import app
from support import PythonProcess, wait_until

Start = Callable[..., PythonProcess]

# The variables of a process, in a line.
VARIABLES = (
    *("PYPS_WORKER_ID", "PYPS_WORKER_INDEX", "PYPS_WORKER_COUNT", "RANK", "LOCAL_RANK", "WORLD_SIZE"),
    *("LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)
TELL = f"import os; print(*[os.environ.get(name, '-') for name in {VARIABLES}], flush=True)\n"
WAITING = f"{TELL}import signal; signal.pause()"


def run(start_python: Start, *flags: str, code: str) -> PythonProcess:
    """Starts `pyps run` with processes that run this Python text."""
    return start_python("-m", "pyps", "run", *flags, "--", "python", "-c", code)


def told(output: str) -> list[tuple[str, dict[str, str]]]:
    """What the processes were told, each with the name it has on the terminal, in the order of the output."""
    lines = [line.partition(" | ") for line in output.splitlines()]
    rows = [(name.strip(), text.split()) for name, _, text in lines if re.match(r"(replica|worker)-\d", name)]
    return [(name, dict(zip(VARIABLES, row, strict=True))) for name, row in rows if len(row) == len(VARIABLES)]


def processes_of(launcher: PythonProcess) -> dict[str, psutil.Process]:
    """The running processes of replicas, by their names on the terminal."""
    found = {}
    for child in psutil.Process(launcher.pid).children():
        # One that has just ended has no environment any more.
        with contextlib.suppress(psutil.NoSuchProcess):
            environment = child.environ()
            if "RANK" in environment:
                found[f"{environment['PYPS_WORKER_ID']}.{environment['RANK']}"] = child
    return found


def announced(launcher: PythonProcess) -> list[str]:
    """What the launcher itself said, without the times."""
    lines = re.findall(r"^pyps +\| (.*)$", launcher.output(), re.M)
    return [re.sub(r" after \d+\.\d s", "", line) for line in lines]


def meeting(folder: Path) -> str:
    """A program of two processes that meet, and work until the file "go" lies in the folder.

    One that has lost the other says so, and ends with an error when the file "seen" lies there.
    """
    return TELL + textwrap.dedent(f"""
        import os, pathlib, select, socket, sys, time
        go, seen = pathlib.Path({str(folder / "go")!r}), pathlib.Path({str(folder / "seen")!r})
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if os.environ["RANK"] == "0":
            other, _ = socket.create_server(address).accept()
        else:
            while True:
                try:
                    other = socket.create_connection(address)
                    break
                except ConnectionRefusedError:
                    time.sleep(0.02)
        print("met", flush=True)
        while not go.exists():
            if select.select([other], [], [], 0.02)[0] and not go.exists():
                print("a process of my replica is gone", flush=True)
                while not seen.exists():
                    time.sleep(0.02)
                sys.exit(1)
    """)


def test_the_processes_of_a_replica_are_one_worker_and_find_each_other(start_python: Start) -> None:
    launcher = run(start_python, "--replicas", "2", "--parts", "3", code=TELL)

    assert launcher.wait() == 0
    output = launcher.output()
    variables = dict(told(output))
    assert sorted(variables) == [f"replica-{r}.{k}" for r in range(2) for k in range(3)]
    for name, one in variables.items():
        worker_id, _, rank = name.partition(".")
        assert one["PYPS_WORKER_ID"] == worker_id
        assert (one["PYPS_WORKER_INDEX"], one["PYPS_WORKER_COUNT"]) == (worker_id[-1], "2")
        assert one["RANK"] == one["LOCAL_RANK"] == rank
        assert one["WORLD_SIZE"] == one["LOCAL_WORLD_SIZE"] == "3"
        assert one["MASTER_ADDR"] == "127.0.0.1"
    meetings = {(one["PYPS_WORKER_ID"], one["MASTER_PORT"]) for one in variables.values()}
    assert len(meetings) == 2, "one place for each replica"
    assert len({port for _, port in meetings}) == 2, "and another for each"
    assert "2 replicas of 3 processes on 1 server," in output
    assert len(re.findall(r"replica-\d finished after", output)) == 2


def test_a_replica_is_started_again_and_meets_elsewhere(start_python: Start, tmp_path: Path) -> None:
    launcher = run(*(start_python, "--replicas", "2", "--parts", "2", "--max-restarts", "1"), code=meeting(tmp_path))
    for name in ("replica-0.0", "replica-0.1", "replica-1.0", "replica-1.1"):
        launcher.wait_for_output(f"{name} | met")
    first_life = processes_of(launcher)

    first_life["replica-1.0"].kill()
    launcher.wait_for_output("replica-1.1 | a process of my replica is gone")
    launcher.wait_for_output("replica-1 ends")
    (tmp_path / "seen").touch()

    wait_until(lambda: launcher.output().count("replica-1.0 | met") == 2, what="a second life")
    wait_until(lambda: launcher.output().count("replica-1.1 | met") == 2, what="a second life")
    second_life = processes_of(launcher)
    assert {name for name, process in second_life.items() if process != first_life[name]} == {
        "replica-1.0",
        "replica-1.1",
    }
    (tmp_path / "go").touch()
    assert launcher.wait() == 0, "the last life of everybody ended well"
    said = announced(launcher)
    assert "replica-1 ends: its process replica-1.0 was killed by SIGKILL; 1 of 2 replicas go on." in said
    assert "replica-1 is started again (restart 1 of 1)." in said
    assert any(line.startswith("replica-1 finished") for line in said)
    ports = {(name, one["MASTER_PORT"]) for name, one in told(launcher.output())}
    assert len({port for name, port in ports if name == "replica-1.0"}) == 2
    assert len({port for name, port in ports if name == "replica-0.0"}) == 1


def test_a_worker_that_fails_is_started_again_and_trains_the_same_run(start_python: Start, tmp_path: Path) -> None:
    once = tmp_path / "once"
    code = (
        "import os, pathlib, signal, numpy, pyps_client\n"
        "with pyps_client.Client({'w': numpy.zeros(8, numpy.float32)}) as client:\n"
        "    print('w', client.pull()['w'][0]); client.push({'w': numpy.ones(8, numpy.float32)})\n"
        f"    if not pathlib.Path({str(once)!r}).exists():\n"
        f"        pathlib.Path({str(once)!r}).touch(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    launcher = run(start_python, "--max-restarts", "3", code=code)

    assert launcher.wait() == 0, launcher.output()
    assert "worker-0 was killed by SIGKILL and is started again (restart 1 of 3)." in announced(launcher)
    assert re.search(r"^worker-0 \| w 0\.0\n(.*\n)+worker-0 \| w -0\.0[45]", launcher.output(), re.M), "its own push"


def test_a_worker_of_one_part_that_fails_again_and_again_ends_the_job_with_an_error(start_python: Start) -> None:
    launcher = run(start_python, "--parts", "1", "--max-restarts", "2", code=f"{TELL}import sys; sys.exit(3)")

    assert launcher.wait() == 1
    lives = told(launcher.output())
    assert len(lives) == 3
    # torch.distributed finds it alone.
    assert all(name == one["PYPS_WORKER_ID"] == "worker-0" for name, one in lives)
    assert all((one["RANK"], one["WORLD_SIZE"]) == ("0", "1") and one["MASTER_PORT"].isdigit() for _, one in lives)
    assert announced(launcher)[-2:-1] == ["worker-0 ended with status 3."]


def test_a_replica_that_fails_before_it_joins_is_not_waited_for(start_python: Start) -> None:
    # A barrier of two workers: the second replica's one push needs the servers to expect the first no more.
    code = (
        "import os, sys, numpy, pyps_client\n"
        "if os.environ['PYPS_WORKER_INDEX'] == '0': sys.exit(3)\n"
        "if os.environ['RANK'] == '1': sys.exit(0)\n"
        "with pyps_client.Client({'w': numpy.zeros(8, numpy.float32)}) as client:\n"
        "    for _ in range(3): client.pull(); client.push({'w': numpy.ones(8, numpy.float32)}, examples=1)\n"
        "print('trained')\n"
    )
    launcher = run(start_python, "--replicas", "2", "--parts", "2", "--protocol", "hardsync", code=code)

    assert launcher.wait() == 1
    assert "replica-1.0 | trained" in launcher.output()
    said = announced(launcher)
    assert "replica-0 never joined: the servers expect it no more." in said
    assert len([line for line in said if line.startswith("replica-0 ends: its process replica-0.")]) == 1


def test_one_interrupt_ends_all_processes_and_starts_none_again(start_python: Start) -> None:
    launcher = run(start_python, "--replicas", "2", "--parts", "2", "--max-restarts", "5", code=WAITING)
    wait_until(lambda: len(told(launcher.output())) == 4, what="four processes")
    everybody = psutil.Process(launcher.pid).children(recursive=True)
    assert len(everybody) == 1 + 4
    command = next(child.cmdline() for child in everybody if "serve" in child.cmdline())
    assert command[command.index("--expected-workers") + 1] == "2", "a replica counts once"

    launcher.signal(signal.SIGINT)

    assert launcher.wait() == 128 + signal.SIGINT
    assert len(told(launcher.output())) == 4
    _, alive = psutil.wait_procs(everybody, timeout=20)
    assert not alive


def test_help_says_where_the_processes_of_a_replica_find_each_other() -> None:
    words = " ".join(CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "100"}).output.split())

    assert "MASTER_ADDR and MASTER_PORT, which are set as under torchrun" in words.replace("│ ", "").replace(" │", "")
    assert "--workers, --replicas" in words
