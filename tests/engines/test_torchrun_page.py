"""docs/torchrun.md: its commands run in a network of their own, and do what the page says.

They run as they stand, but for other scripts, counts and a folder, and for torchrun's `last_call_timeout` of a second.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support import ROOT, PythonProcess, StartPython, wait_until

torchx = pytest.importorskip("torchx", reason="TorchX is not installed: make test-engines")

PAGE = (ROOT / "docs" / "torchrun.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```", PAGE, re.M | re.S)
[HEALTH] = re.findall(r"`(pyps health .*?)`", PAGE)
[HELP] = re.findall(r"`(torchx run .*? --help)`", PAGE)
SERVE, TORCHRUN, LOCAL, ELSEWHERE, BEFORE, TRAIN, AFTER, FOUND = BLOCKS
ENTER = "import os, sys; os.execvp('nsenter', ['nsenter', *sys.argv[1:]])"
# By itself torchrun waits half a minute for a node more.
SOON = "--rdzv-conf last_call_timeout=1"
# What a namespace's first process does: it holds it, and all in it ends with it.
HOLD = "ip link set lo up && touch up && exec sleep infinity"
# Alone until the other node is there; then one is killed, once all four train; then all train to the end.
RANK = """
import os, signal, torch
from pathlib import Path
from pyps_client import RemoteOptimizer

model = torch.nn.Linear(4, 2)
optimizer = RemoteOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.001))
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
killed = Path("killed").exists()
print(f"rank {rank} of {size} at {'the beginning' if not optimizer.global_step else 'a later update'}", flush=True)
step = 0
while size == 2 or not killed or step < 20:
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    step += 1
    if size == 2 and step == 20:
        Path("begun").touch()
    if size == 4 and not killed:
        Path(f"trains-{rank}").touch()
        if rank == 1 and len([*Path().glob("trains-*")]) == 4:
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
optimizer.close()
print("trained to the end", flush=True)
"""
# The example, until the run is stopped.
ENDLESS = (ROOT / "examples" / "minimal.py").read_text(encoding="utf-8").replace("range(20)", "range(10**6)")
ENDLESS += "    if optimizer.finished:\n        break\n"
# The second worker fails at first; all of them always, where the script says so.
FAILING = """
import os, sys
from pathlib import Path
if os.environ["PYPS_WORKER_INDEX"] == "1" or "always" in sys.argv:
    if not Path("failed").exists() or "always" in sys.argv:
        Path("failed").touch()
        sys.exit("no such luck")
exec(Path(sys.argv[1]).read_text(encoding="utf-8"))
"""

Run = Callable[[str], PythonProcess]


@pytest.fixture
def run(start_python: StartPython, tmp_path: Path) -> Iterator[Run]:
    """Runs a text of the shell in a network of the test's own, in a folder with the examples."""
    flags = ("--net", "--pid", "--mount-proc", "--fork", "--kill-child")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    with subprocess.Popen(["unshare", *flags, "sh", "-c", HOLD], cwd=tmp_path, stderr=subprocess.DEVNULL) as holder:
        try:
            wait_until(lambda: (tmp_path / "up").exists() or holder.poll() is not None, what="a network of its own")
            if holder.poll() is not None:
                pytest.skip("no network namespace may be made here")
            children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text(encoding="ascii")
            path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

            def started(text: str) -> PythonProcess:
                enter = ("--target", children.strip(), "--net", "--pid", "--mount", f"--wd={tmp_path}")
                # Hooks only where the page sets them.
                env = {"PATH": path, "PYPS_PROCESS_HOOKS": None, "OMP_NUM_THREADS": "1"}
                return start_python("-c", ENTER, *enter, "bash", "-c", text, env=env, fresh=True)

            yield started
        finally:
            holder.kill()


def test_torchrun_takes_in_another_node_and_restarts_what_died(run, tmp_path):
    (tmp_path / "rank.py").write_text(RANK, encoding="utf-8")
    server = run(SERVE)
    node = TORCHRUN.replace("examples/minimal.py", "rank.py").replace("--rdzv-id", f"{SOON} --rdzv-id")
    first = run(node)
    wait_until((tmp_path / "begun").exists, 120, "training on one node")
    second = run(node)

    assert (first.wait(240), second.wait(240)) == (0, 0)

    output = first.output() + second.output()
    # Once with the second node, once after the death.
    assert output.count("of 4 at a later update") == 8
    # One that is quick has ended before another dies, and does so again.
    assert output.count("trained to the end") >= 4
    assert " digits " in run("pyps status").wait_for_output("finished")
    assert server.running


def test_servers_are_found_again_in_a_file_after_they_moved(run, tmp_path):
    (tmp_path / "endless.py").write_text(ENDLESS, encoding="utf-8")
    first = run(BEFORE.replace("pyps serve", "echo $$ > first; exec pyps serve"))
    first.wait_for_output("data           127.0.0.2:7610")
    worker = run(TRAIN.replace("examples/minimal.py", "endless.py"))
    worker.wait_for_output("epoch 0")

    run("kill $(cat first)").wait()
    assert first.wait() == 0
    run(AFTER).wait_for_output("127.0.0.3:7610")
    assert "127.0.0.3" in run(FOUND).wait_for_output("ready")
    assert run(HEALTH).wait() == 0

    worker.wait_for_output("server 0 (file:servers#0) is at 127.0.0.3:7610 now")
    run("pyps stop --servers file:servers").wait_for_output("has finished its run")
    assert worker.wait() == 0


def test_torchx_trains_on_this_machine_and_its_servers_end_with_the_workers(run):
    job = run(LOCAL)
    assert job.wait() == 0
    assert job.output().count("epoch 19") == 2
    assert "Job finished: SUCCEEDED" in job.output()


def test_torchx_lists_every_option_that_the_page_names(run):
    listed = run(HELP)
    assert listed.wait() == 0
    named = set(re.findall(r"--[a-z]+_[a-z_]+", PAGE))
    assert named >= {"--max_restarts", "--checkpoint_dir"}
    assert [option for option in sorted(named) if option not in listed.output()] == []


def test_a_worker_of_torchx_that_fails_is_started_again_or_the_job_fails_and_ends(run, tmp_path):
    (tmp_path / "failing.py").write_text(FAILING, encoding="utf-8")
    job = LOCAL.replace("examples/minimal.py", "failing.py examples/minimal.py").strip()
    again = run(job.replace("--servers 2", "--servers 1 --max_restarts 1"))
    assert again.wait() == 0
    assert again.output().count("epoch 19") == 2

    failed = run(f"{job} always".replace("--servers 2", "--servers 1 --idle_seconds 1"))
    assert failed.wait() == 1
    assert "no such luck" in failed.output()
    assert "no worker was there for 1 s" in failed.output()


@pytest.mark.parametrize(
    "line", ELSEWHERE.replace("\\\n", "").splitlines(), ids=lambda line: re.search(r"-s (\w+)", line)[1]
)
def test_torchx_shows_the_job_that_it_would_submit(run, line):
    if " -s kubernetes " in line:
        pytest.importorskip("kubernetes", reason="the client of Kubernetes is not installed")
    job = run(line)
    assert job.wait() == 0
    shown = job.output()
    for index in range(2):
        assert "pyps serve --host 0.0.0.0" in shown
        assert f"7610 + 10 * {index}" in shown
    assert shown.count("PYPS_WORKER_KEY") >= 4
    assert ("SLURM_JOB_NODELIST_HET_GROUP_0" if "slurm" in line else "VC_SERVER_0_HOSTS") in shown


def test_workers_find_servers_on_machines_of_their_own(tmp_path):
    from pyps.torchx import train

    [worker] = [role for role in train(script="train.py", servers=2).roles if role.name == "worker"]
    for rank0_env, hosts, found in (
        ("VC_SERVER_0_HOSTS", {"VC_SERVER_0_HOSTS": "a", "VC_SERVER_1_HOSTS": "b"}, "a:7610,b:7620"),
        ("TORCHX_RANK0_HOST", {"TORCHX_RANK0_HOST": "c"}, "c:7610,c:7620"),
    ):
        values = torchx.specs.macros.Values(img_root="", app_id="app", replica_id="0", rank0_env=rank0_env)
        text = values.apply(worker).args[1].replace("exec python train.py", "echo $PYPS_SERVERS")
        assert subprocess.check_output(["bash", "-c", text], env=hosts, text=True).strip() == found


@pytest.mark.parametrize(
    "wrong", [{"servers": 0}, {"workers": 0}, {"port": 0}, {"max_restarts": -1}, {"idle_seconds": 0}]
)
def test_a_job_of_nothing_is_refused(wrong):
    from pyps.torchx import train

    with pytest.raises(ValueError, match=f"--{next(iter(wrong))} is .*; expected . or more"):
        train(script="train.py", **wrong)
