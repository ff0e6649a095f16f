"""pyps.ray on a real Ray cluster of several nodes, in a network namespace; nodes, servers and workers are killed."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from pyps_wire.errors import PypsError
from support import ROOT, PythonProcess, child_environment, shell, wait_until

pytest.importorskip("ray", reason="Ray is not installed: make test-engines installs it")
TRIED = ("unshare", "-rn", "sh", "-c", "ip link set lo up && curl --version")
if subprocess.run(TRIED, capture_output=True).returncode:
    pytest.skip("no network namespace can be made here, or ip or curl is missing", allow_module_level=True)

FOLDER = ROOT / "tests" / "engines"
PAGE = (ROOT / "docs" / "ray.md").read_text(encoding="utf-8")
[FUNCTION] = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
COMMANDS = re.findall(r"^pyps .*", "".join(PAGE.split("```")[1::2]), re.M)
KEPT_IN_MEMORY = ("ca.crt", "ca.key", "operator", "server.crt", "server.key", "token")
PLACES = ("--resources", "worker=1", "--server-resources", "server=1")


class Cluster:
    """Nodes of Ray, and programs that run in their network."""

    def __init__(self, folder: Path) -> None:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._folder = folder
        places = {"RAY_TMPDIR": str(folder), "TMPDIR": str(folder), "PATH": path}
        self._environment = {**places, "RAY_DEDUP_LOGS": "0"}
        self._process = subprocess.Popen(
            ["unshare", "-rn", sys.executable, str(FOLDER / "ray_cluster.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment({**self._environment, "RAY_USAGE_STATS_ENABLED": "0"}),
        )
        self._environment["RAY_ADDRESS"], self._pid = self._read().split()

    def command(self, line: str) -> None:
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)
        while self._read() != line:
            continue

    def start(self, *command: str, cwd: Path = ROOT) -> PythonProcess:
        program = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
        enter = ("nsenter", "-t", self._pid, "-U", "-n", "--preserve-credentials")
        return PythonProcess("-c", program, *enter, *command, env=self._environment, cwd=cwd, fresh=True)

    def train(self, folder: Path, **options: object) -> PythonProcess:
        return self.start("python", str(FOLDER / "ray_script.py"), str(folder), repr(options))

    def logs(self) -> str:
        """What all actors printed: of the last lines a job shows those that Ray brings in time."""
        paths = self._folder.glob("ray/session_2*/logs/worker-*.out")
        return "".join(path.read_text(errors="replace") for path in paths)

    def close(self) -> None:
        self._process.communicate(timeout=60)

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the cluster ended"
        return line.strip()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # Ray's sockets want a short path.
    folder = Path(tempfile.mkdtemp(prefix="ray"))
    cluster = Cluster(folder)
    try:
        cluster.command("add servers-0 server")
        cluster.command("add workers-0 worker")
        yield cluster
    finally:
        cluster.close()
        # Of all that was killed.
        left = [path for path in folder.glob("pyps-*/*") if path.name in KEPT_IN_MEMORY]
        shutil.rmtree(folder, ignore_errors=True)
    assert not left


def lives(folder: Path) -> set[int]:
    return {int(path.name.removeprefix("life-")) for path in folder.glob("life-*")}


def living(folder: Path) -> set[int]:
    return {pid for pid in lives(folder) if psutil.pid_exists(pid)}


def serving(word: str) -> list[psutil.Process]:
    """Return the servers with the word in their command or in the name of their run."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        command, environment = process.info["cmdline"] or [], process.info["environ"] or {}
        if "serve" in command and any(word in each for each in [*command, environment.get("PYPS_RUN_ID", "")]):
            found.append(process)
    return found


def ended(job: PythonProcess, folder: Path) -> str:
    """End a job; return its output."""
    (folder / "end").touch()
    assert job.wait() == 0, job.output()
    assert "Traceback" not in job.output()
    return job.output()


def test_the_page_runs_as_it_stands(cluster, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "train.py").write_text(FUNCTION, encoding="utf-8")
    plain, replicas = COMMANDS
    with cluster.start("python", "train.py", cwd=tmp_path) as function:
        with cluster.start(*shlex.split(plain), cwd=tmp_path) as script:
            assert script.wait() == 0
            assert re.search(r"worker-1 pid=.* epoch 19, update", script.output())
        assert function.wait() == 0
        assert re.search(r"^\[\S+, \S+\]$", function.output(), re.M)
    assert list(tmp_path.glob("checkpoints/server-1/checkpoint-*.json"))
    with cluster.start(*shlex.split(replicas), cwd=tmp_path) as script:
        assert script.wait() == 0
        # The first process of each prints, and the whole model is trained by two workers.
        assert re.search(r"worker-1 pid=.* step +20 +update +\d+", script.output())


def test_workers_of_a_dead_node_go_on_elsewhere_or_the_run_ends_without_them(cluster, tmp_path):
    with cluster.train(tmp_path, servers=2, workers=2, resources={"alone": 3}) as job:
        job.wait_for_output("waiting for room for [{'server': 1}, {'server': 1}, {'alone': 3}, {'alone': 3}]")
        cluster.command("add alone-0 alone")
        cluster.command("add alone-1 alone")
        wait_until(lambda: len(lives(tmp_path)) == 2)
        cluster.command("kill alone-0")
        cluster.command("add alone-2 alone")
        wait_until(lambda: len(lives(tmp_path)) == 3)
        cluster.command("kill alone-2")
        wait_until(lambda: len(living(tmp_path)) == 1)
        output = ended(job, tmp_path)
    assert re.search(r"the job ends without worker-\d, whose nodes died: the others have finished", output)
    assert re.search(r"returned \[(None, '.*'|'.*', None)\]", output)


def test_a_server_comes_back_from_its_checkpoint_on_its_node_and_on_another(cluster, tmp_path):
    kept = tmp_path / "kept"
    with cluster.train(tmp_path, servers=2, workers=2, checkpoint_dir=str(kept), checkpoint_seconds=0.2) as job:
        wait_until(lambda: len(lives(tmp_path)) == 2 and list(kept.glob("server-0/checkpoint-*.json")))
        # With its actor alone it still saves, and then makes room for the next.
        [server] = serving(str(kept / "server-0"))
        server.parent().kill()
        job.wait_for_output("server-0 is back at ")
        cluster.command("add servers-1 server")
        for server in serving(str(kept)):
            server.kill()
        cluster.command("kill servers-0")
        wait_until(lambda: job.output().count("is back at ") == 3)
        back = time.time()
        wait_until(lambda: all(path.stat().st_mtime > back for path in tmp_path.glob("life-*")))
        # Workers found them by themselves, wherever they were: none was started again.
        assert len(lives(tmp_path)) == 2
        output = ended(job, tmp_path)
    with cluster.train(tmp_path, servers=2, checkpoint_dir=str(kept), resume=True, run_id="another") as job:
        assert job.wait() == 1
        assert "but this server was started for 'another'" in job.output()
    assert len(set(re.findall(r"server-0 is back at ([0-9.]+)", output))) == 2
    assert f"the model was kept: pyps export model.safetensors --checkpoint {kept}" in output


def test_a_standby_goes_on_in_place_of_a_dead_server_also_for_workers_that_start_then(cluster, tmp_path):
    given = {"servers": 2, "workers": 2, "standby": True, "standby_lease_seconds": 1.0, "run_id": "followed"}
    with cluster.train(tmp_path, **given) as job:
        wait_until(lambda: len(lives(tmp_path)) == 2 and job.output().count("all shards are here") == 2)
        primaries = [server for server in serving("followed") if "--standby-of" not in server.cmdline()]
        primaries[0].kill()
        job.wait_for_output("goes on in its place at ")
        os.kill(min(lives(tmp_path)), signal.SIGKILL)
        wait_until(lambda: len(lives(tmp_path)) == 3)
        back = time.time()
        wait_until(lambda: sum(path.stat().st_mtime > back for path in tmp_path.glob("life-*")) == 2)
        [dead] = re.findall(r"server-(\d) died: standby-\1 goes on in its place at \S+", job.output())
        other = 1 - int(dead)
        [standby] = [server for server in serving("followed") if f"pyps-standby-{other}-" in str(server.cmdline())]
        standby.kill()
        job.wait_for_output(f"standby-{other} died: server-{other} goes on without a standby")
        job.wait_for_output("the server goes on alone: an operator says so")
        alone = time.time()
        wait_until(lambda: sum(path.stat().st_mtime > alone for path in tmp_path.glob("life-*")) == 2)
        ended(job, tmp_path)


def test_a_standby_is_started_again_as_what_it_was(cluster, tmp_path):
    kept = tmp_path / "kept"
    given = {"standby": True, "standby_lease_seconds": 1.0, "checkpoint_dir": str(kept), "checkpoint_seconds": 0.2}

    def kill(is_standby: bool) -> None:
        [process] = [each for each in serving(str(kept)) if ("pyps-standby-" in str(each.cmdline())) == is_standby]
        process.kill()

    with cluster.train(tmp_path, **given) as job:
        wait_until(lambda: job.output().count("all shards are here") == 1)
        kill(is_standby=True)
        job.wait_for_output("standby-0 died: Ray restarts it, to follow server-0")
        wait_until(lambda: job.output().count("all shards are here") == 2)
        kill(is_standby=False)
        job.wait_for_output("server-0 died: standby-0 goes on in its place")
        took_over = time.time()
        wait_until(lambda: any(path.stat().st_mtime > took_over for path in kept.glob("server-0/checkpoint-*.json")))
        kill(is_standby=True)
        job.wait_for_output("standby-0 died: Ray restarts it, from its newest checkpoint")
        wait_until(lambda: job.output().count("standby-0 is back at ") == 2)
        back = time.time()
        wait_until(lambda: all(path.stat().st_mtime > back for path in tmp_path.glob("life-*")))
        assert f"the model was kept: pyps export model.safetensors --checkpoint {kept}" in ended(job, tmp_path)
    assert len(lives(tmp_path)) == 1


def test_an_exception_of_a_worker_ends_the_job_and_reaches_the_caller(cluster, tmp_path):
    with cluster.train(tmp_path, workers=2) as job:
        wait_until(lambda: len(lives(tmp_path)) == 2)
        (tmp_path / "raise").touch()
        assert job.wait() == 1
        assert re.search(r"^KeyError: 'a bug of worker 1'", job.output(), re.M)
        # The others saw a worker that failed, not one that fell silent.
        assert re.search(r"worker left .*worker=worker-1 .*state=failed", job.output())


def test_a_function_may_end_by_sys_exit(cluster):
    program = (
        "import functools, sys, pyps.ray; "
        "train = functools.partial(pyps.ray.run, resources={'worker': 1}, server_resources={'server': 1}); "
        "print('returned', train(sys.exit)); train(functools.partial(sys.exit, 3))"
    )
    with cluster.start("python", "-c", program) as job:
        assert job.wait() == 1
        assert "returned [None]" in job.output()
        assert re.search(r"^pyps\.launcher\.job\.JobError: worker-0 ended by sys\.exit\(3\)$", job.output(), re.M)


def test_a_program_that_is_not_there_ends_the_job_in_words(cluster):
    with cluster.start("pyps", "ray", *PLACES, "--", "nosuchprog") as job:
        assert job.wait() == 1
        assert re.search(
            r"^pyps: 'nosuchprog' cannot be started on \S+: No such file or directory$", job.output(), re.M
        )


def test_what_cannot_go_on_ends_in_words(cluster, tmp_path):
    kept = tmp_path / "kept"
    failing = ("python", "-c", "raise SystemExit(3)")
    with (
        cluster.train(tmp_path, run_id="unkept", workers=2) as unkept,
        cluster.train(tmp_path, checkpoint_dir=str(kept)) as unseen,
        cluster.start("pyps", "ray", "--max-restarts", "1", *PLACES, "--", *failing) as script,
    ):
        wait_until(lambda: len(lives(tmp_path)) == 3)
        # Another node would not see it either.
        kept.rename(tmp_path / "moved")
        for server in serving("unkept") + serving(str(kept)):
            server.kill()
        assert unkept.wait() == unseen.wait() == script.wait() == 1
        assert "JobError: server-0 died, and the run cannot go on without its shards" in unkept.output()
        assert f"where {kept}/server-0 holds no checkpoint: name a folder that all nodes see" in unseen.output()
        assert cluster.logs().count("python ended with status 3") == 2
        assert "pyps: no worker finished; their last lines say why" in script.output()


@pytest.mark.parametrize(
    ("how", "environment", "folder"),
    [(signal.SIGINT, (), ("--checkpoint-dir", "kept")), (signal.SIGTERM, ("PYPS_CHECKPOINT_DIR=kept",), ())],
)
def test_a_signal_ends_a_job_and_its_servers_save(cluster, tmp_path, how, environment, folder):
    kept = tmp_path / "kept"
    script = ("--", "python", str(FOLDER / "ray_script.py"), str(tmp_path))
    with cluster.start("env", *environment, "pyps", "ray", *PLACES, *folder, *script, cwd=tmp_path) as job:
        wait_until(lambda: lives(tmp_path))
        [(look, metrics)] = re.findall(r"Look inside: (.*)\npyps: metrics: (\S+)", job.output())
        certificate, token = re.findall(r"=(/\S+)", look)
        header = f"authorization: Bearer {Path(token).read_text().strip()}"
        fetch = ("curl", "-s", "--cacert", certificate, "-H", header, metrics)
        for command, expected in ((shlex.split(look), "worker-0"), (fetch, 'pyps_workers{state="alive"} 1.0')):
            with cluster.start("env", *command) as shown:
                assert shown.wait() == 0
                assert expected in shown.output()
        job.signal(how)
        assert job.wait() != 0
        # Of a server that ends late, or not well, the job says so.
        assert "pyps: server-0" not in job.output()
        assert "Traceback" not in job.output()
    wait_until(lambda: not living(tmp_path) and not serving(str(kept)))
    assert list(kept.glob("server-0/checkpoint-*.json"))


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        ({"workers": 0}, "workers is 0; expected a whole number, 1 or more"),
        ({"port": 7610}, "there is no setting 'port' for servers on Ray; there are batch_growth, "),
        ({"standby": 2}, "standby is 2; expected True or False"),
        ({"standby_of": "127.0.0.1:7610"}, "there is no setting 'standby_of' for servers on Ray"),
        ({"resources": {"GPU": "1"}}, "resources has '1' of 'GPU'; expected a number above 0, as in {'GPU': 1}"),
        ({"resources": ["GPU"]}, "resources is ['GPU']; expected names and numbers, as in {'GPU': 1}"),
        ({"train_fn": 5}, "train_fn is 5; expected a function"),
        ({"train_fn": partial(print, threading.Lock())}, "train_fn cannot be sent to workers: cannot pickle"),
        ({"run_id": "a b\n"}, "run_id is 'a b\\n', 4 characters long: give a name of at most"),
        ({"run_id": "a b "}, "run_id is 'a b '; expected a name without spaces around it"),
        ({"checkpoint_dir": ""}, "checkpoint_dir is ''; expected a folder's path"),
        ({"checkpoint_dir": 5}, "checkpoint_dir is 5; expected a folder's path"),
        ({"resume": True}, "the flag --resume needs a folder to resume from: give --checkpoint-dir too"),
        ({"protocol": "softsinc"}, "the flag --protocol cannot be used: protocol 'softsinc' is unknown"),
        ({"servers": 2, "protocol": "asgd:mutex=whole"}, "one server"),
    ],
)
def test_nonsense_is_refused_before_ray_is_asked(given, refusal):
    import pyps.ray

    with pytest.raises(PypsError, match=re.escape(refusal)):
        pyps.ray.run(**({"train_fn": print} | given))


def test_the_command_refuses_what_is_no_bundle_and_a_machine_without_ray(monkeypatch):
    expected = "--resources is 'GPU'; expected names and numbers, as CPU=4,GPU=1"
    assert expected in shell("ray", "--resources", "GPU", "--", "true", status=2)

    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "pyps.ray")
    assert "pip install '.[ray]' in a clone" in shell("ray", "--", "true", status=2)
