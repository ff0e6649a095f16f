import contextlib
import re
import shlex
import signal
import socket
import time
from pathlib import Path

import psutil
from safetensors.numpy import load_file

from pyps.cli.run import Kept
from pyps.launcher.job import SIGNALS_APART_SECONDS
from pyps.storage.folder import newest
from support import PythonProcess, StartPython, replace_file, shell, wait_until
from wire_worker import UNREAD, WireWorker, unread_pull

# A worker that prints its name and waits for its end.
WAITING = "import os, signal; print('ready', os.environ['PYPS_WORKER_ID'], flush=True); signal.pause()"

JOINED = f"import numpy, pyps_client; pyps_client.Client({{'w': numpy.zeros(4, numpy.float32)}}); {WAITING}"


def run(start_python: StartPython, *flags: str, code: str, env: dict[str, str | None] | None = None) -> PythonProcess:
    return start_python("-m", "pyps", "run", *flags, "--", "python", "-c", code, env=env)


def servers_of(launcher: PythonProcess) -> list[psutil.Process]:
    living = [child for child in psutil.Process(launcher.pid).children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in living if "serve" in child.cmdline()]


def server_of(launcher: PythonProcess, folder: Path) -> psutil.Process:
    return next(server for server in servers_of(launcher) if str(folder) in server.cmdline())


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive, f"left behind: {alive}"


def assert_interrupted(launcher: PythonProcess) -> None:
    """Send SIGINT, which must end the launcher and everything that it started."""
    everybody = psutil.Process(launcher.pid).children(recursive=True)
    launcher.signal(signal.SIGINT)
    assert launcher.wait() == 128 + signal.SIGINT
    assert_gone(everybody)


def test_all_workers_finish_and_the_job_ends_with_status_0(start_python):
    code = (
        "import os; print(os.environ['PYPS_WORKER_INDEX'], 'of', os.environ['PYPS_WORKER_COUNT'], "
        "len(os.environ['PYPS_SERVERS'].split(',')), len(os.environ['PYPS_CONTROL'].split(',')), "
        "os.environ['PYPS_RUN_ID'])"
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        flags = ("--servers", "2", "--workers", "2")
        launcher = run(start_python, *flags, code=code, env={"PYPS_LANE_PORT": port})
        assert launcher.wait() == 0, launcher.output()
    output = launcher.output()
    lines = {match[1]: match[2] for match in re.finditer(r"^worker-(\d) \| \d of 2 2 2 (run-\w+)$", output, re.M)}
    assert lines.keys() == {"0", "1"}
    assert len(set(lines.values())) == 1, "one run for all"
    assert "pyps status --servers 127.0.0.1:" in output
    assert re.search(r"pyps export FILE --servers 127\.0\.0\.1:\d+,127\.0\.0\.1:\d+$", output, re.M)
    assert not re.search(r"^server-", output, re.M), "nothing happened to the servers"
    assert output.endswith("| The model was not kept: add --checkpoint-dir FOLDER.\n")
    assert output.index("| The model will not be kept: add --checkpoint-dir FOLDER.\n") < output.index("finished after")


def test_a_job_says_how_to_export_and_is_resumed_under_its_run(start_python, tmp_path):
    code = (
        "import numpy, os, pyps_client\n"
        "with pyps_client.Client({'w': numpy.zeros(4, numpy.float32)}) as client:\n"
        "    print('run', os.environ['PYPS_RUN_ID'], 'w', client.pull()['w'][0])\n"
        "    client.push({'w': numpy.ones(4, numpy.float32)})\n"
    )
    folder = tmp_path / "my checkpoints"
    # The model has one shard: a server holds none, and says so in its checkpoint.
    flags = ("--servers", "2", "--checkpoint-dir", str(folder))
    training = ("--clip-norm", "100", "--epoch-examples", "100", "--batch-growth", "start=8,maximum=64")
    logs = ("--verbose", "--update-log", str(tmp_path / "logs"), "--log-gradients", "--stall-seconds", "20")
    first = run(start_python, *flags, *training, *logs, "--run-id", "mine", code=code, env={"PYPS_LANE_PORT": "off"})
    assert first.wait() == 0, first.output()
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["server-0", "server-1"]
    for name in ("server-0", "server-1"):
        assert re.search(rf"^{name} \|   data +127\.0\.0\.1:\d+$", first.output(), re.M)
        assert re.search(rf"^{name} \|   lane +not offered$", first.output(), re.M)
    assert "run mine w 0.0" in first.output()
    command = shlex.split(first.output().splitlines()[-1].partition("The model was kept: ")[2])
    assert command == ["pyps", "export", "model.safetensors", "--checkpoint", str(folder)]
    model = tmp_path / command[2]
    export = start_python("-m", *command[:2], str(model), *command[3:])
    assert export.wait() == 0, export.output()
    exported = load_file(model)["w"]
    assert exported.shape == (4,) and (exported == exported[0]).all() and exported[0] < 0

    other = run(start_python, "--checkpoint-dir", str(folder), "--resume", code=code)
    assert other.wait() == 0, other.output()
    assert f"The run in {folder} was on 2 servers and goes on on 1." in other.output()
    assert f"run mine w {exported[0]!s}\n" in other.output()
    assert f"pyps export model.safetensors --checkpoint '{folder}'\n" in other.output()

    # Once more, onto two.
    second = run(start_python, *flags, "--resume", code=code)

    assert second.wait() == 0, second.output()
    assert "nothing to resume" not in second.output()
    [twice] = re.findall(r"run mine w (\S+)\n", second.output())
    assert float(twice) < exported[0]


def test_the_servers_hear_at_once_of_a_worker_that_was_killed(start_python):
    code = (
        "import os, signal, numpy, pyps_client\n"
        "with pyps_client.Client({'w': numpy.zeros(4, numpy.float32)}) as client:\n"
        "    for step in range(4):\n"
        "        if step == 2 and os.environ['PYPS_WORKER_INDEX'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
        "        client.exchange({'w': numpy.ones(4, numpy.float32)})\n"
        "print('trained')\n"
    )
    # The others must not wait for the end of its lease.
    env = {"PYPS_LEASE_SECONDS": "500", "PYPS_STALL_SECONDS": "500"}
    launcher = run(start_python, "--workers", "3", "--protocol", "hardsync", code=code, env=env)
    assert launcher.wait() == 1
    assert launcher.output().count("| trained") == 2
    assert "worker-1 was killed by SIGKILL" in launcher.output()


def test_a_failed_last_checkpoint_is_reported_with_its_reason(start_python, tmp_path):
    code = (
        "import numpy, pathlib, pyps_client\n"
        "with pyps_client.Client({'w': numpy.zeros(4, numpy.float32)}) as client:\n"
        "    client.push({'w': numpy.ones(4, numpy.float32)})\n"
        f"    pathlib.Path({str(tmp_path)!r}, 'kept/server-0').rename({str(tmp_path / 'away')!r})\n"
    )
    launcher = run(start_python, "--checkpoint-dir", str(tmp_path / "kept"), code=code)
    assert launcher.wait() == 1
    assert re.search(r"server-0 \| .* the folder is gone, make it again", launcher.output())
    assert launcher.output().endswith(
        f"No whole model was kept in {tmp_path / 'kept'}: server-0 ended without the last checkpoint"
        " (the lines above say why).\n"
    )


def test_flags_after_the_program_are_the_workers(start_python, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import os, sys; print(os.environ['PYPS_MY_DATA'], sys.argv[1:])", encoding="utf-8")

    flags = ("--checkpoint-dir", str(tmp_path), "--resume")
    # PYPS_MY_DATA is the user's own variable, not a misspelt setting.
    command = ("run", *flags, "python", str(script), "--workers", "7", "--lr", "1")
    launcher = start_python("-m", "pyps", *command, env={"PYPS_MY_DATA": "a folder"})

    assert launcher.wait() == 0
    assert "worker-0 | a folder ['--workers', '7', '--lr', '1']" in launcher.output()
    assert f"No whole model was kept in {tmp_path}: the servers held none yet." in launcher.output()
    assert f"There was nothing to resume in {tmp_path}: a new run begins." in launcher.output()


def test_one_interrupt_ends_workers_servers_and_what_they_started(start_python):
    grandchild = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    code = f"{grandchild}; {WAITING}"
    launcher = run(start_python, "--workers", "2", code=code)
    for name in ("worker-0", "worker-1"):
        launcher.wait_for_output(f"ready {name}")
    assert len(psutil.Process(launcher.pid).children(recursive=True)) == 1 + 2 + 2
    assert_interrupted(launcher)


def test_a_second_interrupt_does_not_wait_for_stubborn_workers(start_python):
    code = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {WAITING}"
    launcher = run(start_python, code=code)
    launcher.wait_for_output("ready worker-0")
    everybody = psutil.Process(launcher.pid).children(recursive=True)

    # One that follows at once is none.
    wait_until(lambda: launcher.signal(signal.SIGINT) or not launcher.running, what="the end")

    assert launcher.wait() == 128 + signal.SIGINT
    assert_gone(everybody)
    assert "did not end within" not in launcher.output()


def test_a_second_interrupt_says_what_is_not_saved_and_all_of_it_is_saved(start_python, tmp_path):
    code = (
        "import numpy, pathlib, pyps_client, time\n"
        f"client = pyps_client.Client({{'w': numpy.zeros({UNREAD}, numpy.float32)}})\n"
        f"while not any(pathlib.Path({str(tmp_path)!r}).glob('*/checkpoint-*.json')): time.sleep(0.05)\n"
        f"for _ in range(3): client.push({{'w': numpy.ones({UNREAD}, numpy.float32)}})\n"
        f"{WAITING}"
    )
    # With all workers gone the server would save before the signal.
    flags = ("--verbose", "--checkpoint-dir", str(tmp_path), "--run-id", "one", "--expected-workers", "2")
    launcher = run(start_python, *flags, code=code, env={"PYPS_DRAIN_SECONDS": "100", "PYPS_DURABILITY": "none"})
    launcher.wait_for_output("ready worker-0")
    address = re.search(r"pyps export FILE --servers (\S+)", launcher.output())[1]
    with WireWorker(address, run_id="one") as observer:
        pull = unread_pull(observer)
        launcher.signal(signal.SIGINT)
        launcher.wait_for_output("server ends")
        # One that follows at once is none.
        time.sleep(SIGNALS_APART_SECONDS)
        launcher.signal(signal.SIGINT)
        launcher.wait_for_output("is saving, 3 updates not saved yet: another signal ends it without them")
        pull.cancel()

    assert launcher.wait() == 128 + signal.SIGINT
    assert newest(tmp_path / "server-0").version_max == 3
    assert "Go on from the newest checkpoints: pyps run --resume --verbose" in launcher.output()


def test_nothing_but_the_model_outlives_a_launcher_that_was_killed(start_python, tmp_path):
    launcher = run(start_python, "--workers", "2", "--checkpoint-dir", str(tmp_path), code=JOINED)
    for name in ("worker-0", "worker-1"):
        launcher.wait_for_output(f"ready {name}")
    everybody = psutil.Process(launcher.pid).children(recursive=True)

    launcher.kill()

    assert_gone(everybody)
    # Also after the second signal that the kernel sends a server whose launcher is gone.
    assert newest(tmp_path / "server-0") is not None


def test_an_interrupt_ends_a_job_that_is_still_starting(start_python):
    launcher = run(start_python, "--servers", "2", code=WAITING)
    wait_until(lambda: servers_of(launcher), what="the first server")
    assert_interrupted(launcher)


def test_a_worker_that_ends_before_it_joins_is_not_waited_for(start_python):
    code = (
        "import os, sys, numpy, pyps_client\n"
        "if os.environ['PYPS_WORKER_INDEX'] == '1': sys.exit(3)\n"
        "with pyps_client.Client({'w': numpy.zeros(8, numpy.float32)}) as client:\n"
        "    for _ in range(3): client.pull(); client.push({'w': numpy.ones(8, numpy.float32)}, examples=1)\n"
        "print('trained')\n"
    )
    launcher = run(start_python, "--workers", "3", "--protocol", "hardsync", code=code)
    assert launcher.wait() == 1
    assert launcher.output().count("| trained") == 2
    assert re.search(
        r"worker-1 ended with status 3 after .* s; 2 of 3 workers go on without it: it never joined, and the"
        r" servers expect it no more\.",
        launcher.output(),
    )


# Makes 40 rounds, and waits for the file "go" amid them.
PUSHING = """
import os, pathlib, sys, time, numpy, pyps_client
if os.environ["PYPS_WORKER_INDEX"] == "2": sys.exit()
ones = {"w": numpy.ones(64, numpy.float32)}
with pyps_client.Client({"w": 0 * ones["w"]}, ("sgd", {"learning_rate": 1.0})) as client:
    for step in range(40):
        client.exchange(ones)
        if step == 2: print("amid the run", flush=True)
        while step == 20 and not pathlib.Path("{go}").exists(): time.sleep(0.02)
"""


def test_servers_that_were_killed_are_started_again_and_each_push_counts_once(start_python, tmp_path):
    go, folder = tmp_path / "go", tmp_path / "kept"
    flags = ("--servers", "2", "--workers", "3", "--checkpoint-dir", str(folder), "--protocol", "hardsync")
    env = {"PYPS_SHARD_SIZE": "16", "PYPS_STALL_SECONDS": "500"}
    launcher = run(start_python, *flags, code=PUSHING.replace("{go}", str(go)), env=env)
    for name in ("worker-0", "worker-1"):
        launcher.wait_for_output(f"{name} | amid the run")
    launcher.wait_for_output("worker-2 finished")

    for name in ("server-0", "server-1"):
        wait_until(lambda name=name: newest(folder / name), what="a checkpoint")
        server_of(launcher, folder / name).kill()
        said = "started again from its newest checkpoint; workers send again what it lacks."
        launcher.wait_for_output(f"{name} was killed by SIGKILL; {said}")
    go.touch()

    assert launcher.wait() == 0, launcher.output()
    for name in ("server-0", "server-1"):
        shards = [state for _, state, _ in newest(folder / name).read()]
        assert shards and all(shard.version == 40 and (shard.parameters == -40).all() for shard in shards)


def test_a_server_that_dies_again_and_again_ends_the_run(start_python, tmp_path):
    folder = tmp_path / "kept"
    launcher = run(start_python, "--servers", "2", "--checkpoint-dir", str(folder), code=JOINED)
    launcher.wait_for_output("ready worker-0")
    for name in ("server-0", "server-1"):
        wait_until(lambda name=name: newest(folder / name), what="a checkpoint")
    everybody = psutil.Process(launcher.pid).children(recursive=True)

    for number in range(6):
        wait_until(lambda number=number: launcher.output().count("started again") == number, what="the next life")
        server_of(launcher, folder / "server-0").kill()

    assert launcher.wait() == 1
    [again] = re.findall(
        r"server-0 was killed by SIGKILL, 5 times since \S+: the run cannot go on without its shards\."
        r" Go on from the newest checkpoints: (.*)",
        launcher.output(),
    )
    assert shlex.split(again)[:6] == ["pyps", "run", "--resume", "--servers", "2", "--checkpoint-dir"]
    assert "server-0 ended without the last checkpoint; kept is version 0 of server-0" in launcher.output()
    assert_gone(everybody)


def test_a_standby_goes_on_in_the_place_of_a_server_that_was_killed(start_python, tmp_path):
    """Also with a worker that joins only then."""
    go = tmp_path / "go"
    code = (
        "import itertools, numpy, os, pathlib, time, pyps_client\n"
        f"go, left = pathlib.Path({str(go)!r}), 30\n"
        "while os.environ['PYPS_WORKER_INDEX'] == '1' and not go.exists(): time.sleep(0.05)\n"
        "with pyps_client.Client({'w': numpy.zeros(4, numpy.float32)}) as client:\n"
        "    for step in itertools.takewhile(lambda step: left, itertools.count()):\n"
        "        left -= go.exists()\n"
        "        client.push({'w': numpy.ones(4, numpy.float32)})\n"
        "        client.pull()\n"
        "        print('step', step, flush=True)\n"
        "        time.sleep(0.05)\n"
    )
    folder = str(tmp_path / "kept")
    launcher = run(start_python, "--standby", "--verbose", "--checkpoint-dir", folder, "--workers", "2", code=code)
    launcher.wait_for_output("all shards are here")
    launcher.wait_for_output("step 3")
    server = next(each for each in servers_of(launcher) if "--standby-of" not in each.cmdline())
    server.kill()
    launcher.wait_for_output("server-0 was killed by SIGKILL: standby-0 goes on in its place.")
    go.touch()
    launcher.wait_for_output("this standby has taken over")
    # Without a standby of its own it comes back from its server's checkpoints.
    servers_of(launcher)[0].kill()
    assert launcher.wait() == 0, launcher.output()
    assert "standby-0 was killed by SIGKILL; started again from its newest checkpoint" in launcher.output()
    assert f"The model was kept: pyps export model.safetensors --checkpoint {folder}" in launcher.output()


def test_nobody_is_told_to_resume_what_a_dead_server_never_wrote(tmp_path):
    (tmp_path / "server-1").mkdir()
    kept = Kept(tmp_path, 2)
    lost = f"It had written no checkpoint: its part of the model is lost. Start again without {tmp_path}."
    assert kept.after_a_death("server-1") == kept.after_a_death("server-0") == lost


def test_a_command_that_does_not_exist_is_named(start_python):
    launcher = start_python("-m", "pyps", "run", "--", "no-such-program", "train.py")

    assert launcher.wait() == 1
    assert "The worker command 'no-such-program' is not on the PATH." in launcher.output()
    assert "Traceback" not in launcher.output()


def test_a_server_that_cannot_start_is_shown_with_its_reason(start_python):
    # An address of documentation (RFC 5737), which is nobody's.
    launcher = run(start_python, code=WAITING, env={"PYPS_HOST": "203.0.113.9", "PYPS_INSECURE": "1"})

    assert launcher.wait() == 1
    reason, *closing = launcher.output().splitlines()
    assert "cannot listen on 203.0.113.9" in reason
    assert len(closing) == 1 and "ended with status 2 before it served" in closing[0]


def refusal(*command: str, **env: str) -> str:
    [line] = shell(*command, status=2, **env).splitlines()
    return line


def test_what_servers_would_refuse_is_refused_before_any_starts():
    for flags, message in (
        (("--optimizer", "nonesuch:learning_rate=1"), "'nonesuch' is unknown"),
        (("--optimizer", "adam:amsgrad=true"), "adam has no setting 'amsgrad'"),
        (("--schedule", "cosine"), "schedule 'cosine' needs length=..."),
        (("--servers", "2", "--protocol", "asgd:mutex=whole"), "needs one server, and the run has 2"),
        (("--workers", "2", "--protocol", "backup:b=2"), "waits for none of 2 workers"),
        (("--log-gradients",), "give --update-log too"),
        (("--clip-norm", "-1"), "the flag --clip-norm is -1, but"),
        (("--replicas", "100", "--parts", "100"), "are 10000 processes, but at most 256 are started on one machine"),
    ):
        assert message in refusal("run", *flags, "--", "python", "-c", WAITING), flags


def test_an_absurd_number_of_servers_is_refused():
    # Of more than one server this protocol is refused too, so none would start.
    command = ("run", "--servers", "65", "--protocol", "asgd:mutex=whole", "--", "python", "-c", WAITING)
    assert "less than or equal to 64" in shell(*command, status=2)


def test_a_misspelt_variable_is_refused_before_anything_starts():
    for variable, value, complaint in (
        ("PYPS_TRANSPORT", "shmem", "PYPS_TRANSPORT is 'shmem'; expected one of auto, shm, tcp, grpc"),
        ("PYPS_PARAMETER_CODEC", "bf16", "PYPS_PARAMETER_CODEC) is 'bf16'; expected one of float32, float16, bfloat16"),
        ("PYPS_USE_PROXY", "maybe", "PYPS_USE_PROXY is 'maybe'; expected yes or no"),
    ):
        assert complaint in refusal("run", "--", "python", "-c", WAITING, **{variable: value})
        assert complaint in refusal("demo", **{variable: value})


def processes_of(launcher: PythonProcess) -> dict[str, psutil.Process]:
    found = {}
    for child in psutil.Process(launcher.pid).children():
        # One that has just ended has no environment any more.
        with contextlib.suppress(psutil.NoSuchProcess):
            environment = child.environ()
            if "RANK" in environment:
                found[f"{environment['PYPS_WORKER_ID']}.{environment['RANK']}"] = child
    return found


def announced(launcher: PythonProcess) -> list[str]:
    """Return the launcher's own lines, without the times."""
    lines = re.findall(r"^pyps +\| (.*)$", launcher.output(), re.M)
    return [re.sub(r" after \d+\.\d s", "", line) for line in lines]


# Waits for the file "go", or fails once the file "fails" has this process's name.
PART = """
import os, pathlib, sys, time
print("meets at", os.environ["MASTER_PORT"], flush=True)
go, fails = pathlib.Path(sys.argv[1], "go"), pathlib.Path(sys.argv[1], "fails")
while not go.exists():
    if fails.exists() and fails.read_text() == "{PYPS_WORKER_ID}.{RANK}".format(**os.environ):
        fails.unlink()
        sys.exit(1)
    time.sleep(0.02)
"""


def test_a_replica_is_started_again_and_meets_at_another_port(start_python, tmp_path):
    command = ("--replicas", "2", "--parts", "2", "--max-restarts", "1", "--", "python", "-c", PART, str(tmp_path))
    launcher = start_python("-m", "pyps", "run", *command)
    for name in ("replica-0.0", "replica-0.1", "replica-1.0", "replica-1.1"):
        launcher.wait_for_output(f"{name} | meets")
    assert "2 replicas of 2 processes on 1 server," in launcher.output()
    [server] = servers_of(launcher)
    assert server.cmdline()[server.cmdline().index("--expected-workers") + 1] == "2", "a replica is one worker"
    first_life = processes_of(launcher)

    first_life["replica-1.0"].kill()
    launcher.wait_for_output("replica-1 ends")
    replace_file(tmp_path / "fails", "replica-1.1")

    wait_until(lambda: len(re.findall(r"replica-1\.[01] \| meets", launcher.output())) == 4, what="a second life")
    second_life = processes_of(launcher)
    restarted = {name for name, process in second_life.items() if process != first_life[name]}
    assert restarted == {"replica-1.0", "replica-1.1"}
    (tmp_path / "go").touch()
    assert launcher.wait() == 0, "the last life of each ended well"
    said = announced(launcher)
    assert "replica-1 ends: its process replica-1.0 was killed by SIGKILL; 1 of 2 replicas go on." in said
    assert "replica-1 is started again (restart 1 of 1)." in said
    assert any(line.startswith("replica-1 finished") for line in said)
    ports = set(re.findall(r"^(replica-\d)\.\d +\| meets at (\d+)$", launcher.output(), re.M))
    assert len(ports) == len({port for _, port in ports}) == 3, "a port for each life"


def test_a_failed_worker_is_started_again_in_the_same_run(start_python, tmp_path):
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
    assert "cannot join yet" not in launcher.output(), "it has the key of the one that was killed"
