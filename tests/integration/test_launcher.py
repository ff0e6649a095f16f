"""`pyps run`: real servers, real workers, and every way that a job may end."""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from safetensors.numpy import load_file

from support import ROOT, PythonProcess, wait_until

Start = Callable[..., PythonProcess]

# A worker that tells its name and waits for its end.
WAITING = "import os, signal; print('ready', os.environ['PYPS_WORKER_ID'], flush=True); signal.pause()"


def run(start_python: Start, *flags: str, code: str, env: dict[str, str | None] | None = None) -> PythonProcess:
    """Starts `pyps run` with workers that run this Python text."""
    return start_python("-m", "pyps", "run", *flags, "--", "python", "-c", code, env=env)


def servers_of(launcher: PythonProcess) -> list[psutil.Process]:
    return [child for child in psutil.Process(launcher.pid).children() if "serve" in child.cmdline()]


def workers_of(launcher: PythonProcess) -> dict[str, psutil.Process]:
    children = psutil.Process(launcher.pid).children()
    return {child.environ()["PYPS_WORKER_ID"]: child for child in children if "serve" not in child.cmdline()}


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive, f"left behind: {alive}"


def test_all_workers_finish_and_the_job_ends_with_status_0(start_python: Start) -> None:
    code = (
        "import os; print(os.environ['PYPS_WORKER_INDEX'], 'of', os.environ['PYPS_WORKER_COUNT'], "
        "len(os.environ['PYPS_SERVERS'].split(',')), len(os.environ['PYPS_CONTROL'].split(',')), "
        "os.environ['PYPS_RUN_ID'])"
    )
    launcher = run(start_python, "--servers", "2", "--workers", "3", code=code)

    assert launcher.wait() == 0
    output = launcher.output()
    lines = {match[1]: match[2] for match in re.finditer(r"^worker-(\d) \| \d of 3 2 2 (run-\w+)$", output, re.M)}
    assert lines.keys() == {"0", "1", "2"}
    assert len(set(lines.values())) == 1, "one run for all"
    assert "pyps status --servers 127.0.0.1:" in output
    assert re.search(r"pyps export FILE --servers 127\.0\.0\.1:\d+,127\.0\.0\.1:\d+$", output, re.M)
    assert not re.search(r"^server-", output, re.M), "nothing happened to the servers"
    assert output.endswith("| The model was not kept: add --checkpoint-dir FOLDER.\n")


def test_verbose_shows_what_the_servers_say(start_python: Start) -> None:
    launcher = run(start_python, "--servers", "2", "--verbose", code="print('trained')")

    assert launcher.wait() == 0
    for name in ("server-0", "server-1"):
        assert re.search(rf"^{name} \|   data +127\.0\.0\.1:\d+$", launcher.output(), re.M)


def test_the_last_line_is_the_command_that_exports_the_model(start_python: Start, tmp_path: Path) -> None:
    code = (
        "import numpy, pyps_client\n"
        "with pyps_client.Client({'w': numpy.full(4096, 7, numpy.float32)}) as client: client.pull()\n"
    )
    folder = tmp_path / "my checkpoints"
    launcher = run(start_python, "--servers", "2", "--checkpoint-dir", str(folder), code=code)
    assert launcher.wait() == 0
    command = shlex.split(launcher.output().splitlines()[-1].partition("The model was kept: ")[2])
    assert command[:3] == ["pyps", "export", "model.safetensors"]
    assert command[3:] == ["--checkpoint", str(folder)]

    model = tmp_path / command[2]
    export = start_python("-m", *command[:2], str(model), *command[3:])

    assert export.wait() == 0, export.output()
    assert (load_file(model)["w"] == 7).all()


def test_a_folder_without_a_model_is_not_said_to_hold_one(start_python: Start, tmp_path: Path) -> None:
    launcher = run(start_python, "--checkpoint-dir", str(tmp_path), code="print('trained nothing')")

    assert launcher.wait() == 0
    assert f"No model was kept in {tmp_path}: the servers held none yet." in launcher.output()


def test_flags_behind_the_workers_program_are_the_workers(start_python: Start, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; print('arguments', sys.argv[1:])")

    launcher = start_python("-m", "pyps", "run", "python", str(script), "--workers", "7", "--lr", "1")

    assert launcher.wait() == 0
    assert "worker-0 | arguments ['--workers', '7', '--lr', '1']" in launcher.output()


def test_a_dead_worker_is_reported_at_once_and_the_others_go_on(start_python: Start, tmp_path: Path) -> None:
    flag = tmp_path / "go"
    code = (
        "import os, pathlib, sys, time\n"
        "if os.environ['PYPS_WORKER_INDEX'] == '1': sys.exit(3)\n"
        f"while not pathlib.Path({str(flag)!r}).exists(): time.sleep(0.02)\n"
    )
    launcher = run(start_python, "--workers", "3", code=code)

    output = launcher.wait_for_output("worker-1 ended with status 3")
    assert "2 of 3 workers go on" in output
    assert launcher.running
    flag.touch()
    assert launcher.wait() == 1
    output = launcher.output()
    assert "worker-0 finished" in output
    assert "worker-2 finished" in output


def test_one_interrupt_ends_workers_servers_and_what_they_started(start_python: Start) -> None:
    grandchild = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    code = f"{grandchild}; {WAITING}"
    launcher = run(start_python, "--servers", "2", "--workers", "2", code=code)
    for name in ("worker-0", "worker-1"):
        launcher.wait_for_output(f"ready {name}")
    everybody = psutil.Process(launcher.pid).children(recursive=True)
    assert len(everybody) == 2 + 2 + 2

    launcher.signal(signal.SIGINT)

    assert launcher.wait() == 128 + signal.SIGINT
    assert_gone(everybody)


def test_a_second_interrupt_does_not_wait_for_stubborn_workers(start_python: Start) -> None:
    code = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {WAITING}"
    launcher = run(start_python, code=code)
    launcher.wait_for_output("ready worker-0")
    everybody = psutil.Process(launcher.pid).children(recursive=True)

    launcher.signal(signal.SIGINT)
    launcher.wait_for_output("Interrupted")
    launcher.signal(signal.SIGINT)

    assert launcher.wait() == 128 + signal.SIGINT
    assert "did not end within" not in launcher.output()
    assert_gone(everybody)


def test_nothing_outlives_a_launcher_that_was_killed(start_python: Start) -> None:
    launcher = run(start_python, "--servers", "2", "--workers", "2", code=WAITING)
    for name in ("worker-0", "worker-1"):
        launcher.wait_for_output(f"ready {name}")
    everybody = psutil.Process(launcher.pid).children(recursive=True)

    launcher.kill()

    assert_gone(everybody)


def test_an_interrupt_ends_a_job_that_is_still_starting(start_python: Start) -> None:
    launcher = run(start_python, "--servers", "3", code=WAITING)
    wait_until(lambda: servers_of(launcher), 20, "the first server")
    everybody = psutil.Process(launcher.pid).children(recursive=True)

    launcher.signal(signal.SIGINT)

    assert launcher.wait() == 128 + signal.SIGINT
    assert_gone(everybody)


def test_an_absurd_number_of_servers_is_refused(start_python: Start) -> None:
    launcher = run(start_python, "--servers", "100000", code=WAITING)

    assert launcher.wait() == 2
    assert "less than or equal to 64" in launcher.output()


def test_a_worker_that_ends_before_it_joins_is_not_waited_for(start_python: Start) -> None:
    code = (
        "import os, sys, numpy, pyps_client\n"
        "if os.environ['PYPS_WORKER_INDEX'] == '1': sys.exit(3)\n"
        "with pyps_client.Client({'w': numpy.zeros(8, numpy.float32)}) as client:\n"
        "    for _ in range(3): client.pull(); client.push({'w': numpy.ones(8, numpy.float32)}, examples=1)\n"
        "print('trained')\n"
    )
    for protocol in ("hardsync", "serial"):
        launcher = run(start_python, "--servers", "2", "--workers", "3", "--protocol", protocol, code=code)
        assert launcher.wait() == 1
        assert launcher.output().count("| trained") == 2
        assert re.search(
            r"worker-1 ended with status 3 after .* s; 2 of 3 workers go on without it: it never joined, and the"
            r" servers expect it no more\.",
            launcher.output(),
        )


def test_a_server_that_dies_ends_the_run(start_python: Start) -> None:
    launcher = run(start_python, "--servers", "2", "--workers", "2", code=WAITING)
    launcher.wait_for_output("ready worker-0")
    everybody = psutil.Process(launcher.pid).children(recursive=True)

    servers_of(launcher)[0].kill()

    assert launcher.wait() == 1
    assert re.search(r"server-\d was killed by SIGKILL: the run cannot go on", launcher.output())
    assert_gone(everybody)


def test_a_command_that_does_not_exist_is_named(start_python: Start) -> None:
    launcher = start_python("-m", "pyps", "run", "--", "no-such-program", "train.py")

    assert launcher.wait() == 1
    assert "The worker command 'no-such-program' is not on the PATH." in launcher.output()
    assert "Traceback" not in launcher.output()


def test_a_server_that_cannot_start_is_shown_with_its_reason(start_python: Start) -> None:
    # An address of documentation (RFC 5737), which is nobody's.
    launcher = run(start_python, code=WAITING, env={"PYPS_HOST": "203.0.113.9", "PYPS_INSECURE": "1"})

    assert launcher.wait() == 1
    reason, *closing = launcher.output().splitlines()
    assert "cannot listen on 203.0.113.9" in reason
    assert len(closing) == 1 and "ended with status 2 before it served" in closing[0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--optimizer", "nonesuch:learning_rate=1"), "'nonesuch' is unknown"),
        (("--optimizer", "adam:amsgrad=true"), "adam has no setting 'amsgrad'"),
        (("--schedule", "cosine"), "schedule 'cosine' needs length=..."),
        (("--servers", "2", "--protocol", "asgd:mutex=whole"), "needs one server, and the run has 2"),
        (("--workers", "2", "--protocol", "backup:b=2"), "leaves nobody of 2 workers to wait for"),
        (("--log-gradients",), "give --update-log too"),
        (("--clip-norm", "-1"), "the flag --clip-norm is -1.0"),
    ],
)
def test_what_servers_would_refuse_is_refused_before_any_starts(
    start_python: Start, flags: tuple[str, ...], message: str
) -> None:
    launcher = run(start_python, *flags, code=WAITING)

    assert launcher.wait() == 2
    assert message in launcher.output()
    assert len(launcher.output().splitlines()) == 1


def test_each_server_keeps_an_update_log_of_its_own(start_python: Start, tmp_path: Path) -> None:
    flags = ("--clip-norm", "1", "--epoch-examples", "100", "--batch-growth", "start=8,maximum=64")
    logs = ("--update-log", str(tmp_path), "--log-gradients", "--stall-seconds", "20")
    launcher = run(start_python, "--servers", "2", *flags, *logs, code="pass")

    assert launcher.wait() == 0, launcher.output()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["server-0", "server-1"]


def test_a_resumed_job_trains_the_run_of_its_checkpoint(start_python: Start, tmp_path: Path) -> None:
    code = (
        "import numpy, os, pyps_client\n"
        "with pyps_client.Client({'w': numpy.zeros(8, numpy.float32)}) as client:\n"
        "    print('run', os.environ['PYPS_RUN_ID'], 'w', client.pull()['w'][0])\n"
        "    client.push({'w': numpy.ones(8, numpy.float32)})\n"
    )
    flags = ("--checkpoint-dir", str(tmp_path))
    first = run(start_python, *flags, "--run-id", "mine", code=code)
    assert first.wait() == 0
    assert "run mine w 0.0" in first.output()

    second = run(start_python, *flags, "--resume", code=code)

    assert second.wait() == 0
    assert re.search(r"run mine w -0\.0[45]", second.output()), second.output()


def test_three_workers_finish_after_the_fourth_was_killed(start_python: Start) -> None:
    script = str(ROOT / "examples" / "digits.py")
    launcher = start_python(
        *("-m", "pyps", "run", "--servers", "2", "--workers", "4", "--", "python", script, "--epochs", "60"),
        env={"PYPS_LEASE_SECONDS": "1", "PYPS_HEARTBEAT_SECONDS": "0.3"},
    )
    launcher.wait_for_output("worker-2 | epoch  10", 60)

    workers_of(launcher)["worker-2"].kill()

    launcher.wait_for_output("worker-2 was killed by SIGKILL")
    assert launcher.wait() == 1
    output = launcher.output()
    assert re.search(r"^server-0 \| .*lease ran out.*worker-2", output, re.M), output
    for name in ("worker-0", "worker-1", "worker-3"):
        assert re.search(rf"^{name} \| held-out accuracy 0\.9[5-9]", output, re.M), output


@pytest.mark.parametrize(
    ("variable", "value", "complaint"),
    [
        ("PYPS_TRANSPORT", "shmem", "PYPS_TRANSPORT is 'shmem'; expected one of auto, shm, grpc"),
        ("PYPS_PULL_CODEC", "bf16", "PYPS_PULL_CODEC is 'bf16'; expected one of float32, float16, bfloat16"),
        ("PYPS_USE_PROXY", "maybe", "PYPS_USE_PROXY is 'maybe'; expected yes or no"),
        ("PYPS_TRANSPROT", "grpc", "PYPS_TRANSPROT in the environment is no setting: did you mean PYPS_TRANSPORT?"),
    ],
)
@pytest.mark.parametrize("command", ["run", "demo"])
def test_a_misspelt_variable_is_refused_before_anything_starts(
    start_python: Start, command: str, variable: str, value: str, complaint: str
) -> None:
    rest = ("--", "python", "-c", "print('started')") if command == "run" else ()
    launcher = start_python("-m", "pyps", command, *rest, env={variable: value})

    assert launcher.wait() == 2
    [line] = launcher.output().splitlines()
    assert complaint in line


def test_a_variable_of_the_workers_own_is_left_alone(start_python: Start) -> None:
    launcher = run(start_python, code="import os; print(os.environ['PYPS_MY_DATA'])", env={"PYPS_MY_DATA": "a folder"})

    assert launcher.wait() == 0
    assert "worker-0 | a folder" in launcher.output()
