"""`pyps slurm`: the script that it makes, what it refuses, and how sbatch gets it."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pyps.cli.main import app
from support import ROOT, shell

SCRIPT = ROOT / "deploy" / "slurm" / "train.sbatch"
PAGE = (ROOT / "docs" / "slurm.md").read_text(encoding="utf-8")
# What the script calls, for one task of each step on this machine: a server ends at scancel, by `exit $SERVED`.
COMMANDS = {
    "scontrol": "echo node0",
    "squeue": 'case "$*" in *--jobs=6*) echo 6 ;; esac',
    "scancel": "touch ended",
    "srun": 'while [[ $1 == --* ]]; do shift; done; SLURM_PROCID=0 SLURM_NTASKS=1 exec "$@"',
    "pyps": """
        [ "$1" = certs ] && exec touch "$4/server.key"
        echo "$@"
        while [ $# != 0 ] && [ "$1" != --ready-file ]; do shift; done
        sleep 0.2
        rm -f ended
        touch "$2"
        for _ in {1..200}; do [ -e ended ] && exit $SERVED; sleep 0.02; done
        exit 9""",
}


def printed(*arguments: str) -> str:
    return shell("slurm", "--print", *arguments)


def test_the_plain_script_is_what_the_page_s_command_prints():
    [command] = re.findall(r"^pyps slurm --print (.*) > train\.sbatch$", PAGE, re.M)
    assert printed(*shlex.split(command)) == SCRIPT.read_text(encoding="utf-8")


def test_options_of_sbatch_come_before_and_behind_the_border_between_servers_and_workers():
    nodes = ("--sbatch", "--time=9:00", "--server-sbatch", "--mem=64G", "--worker-sbatch", "--gpus-per-task=1 -c 8")
    script = printed(*nodes, "--servers", "3", "--workers", "5", "--run-id", "digits", "--", "python", "train.py")
    of_servers, of_workers = script.partition("\nexport ")[0].split("#SBATCH hetjob\n")
    assert {"--time=9:00", "--mem=64G", "--nodes=3", "--job-name=digits"} <= {*of_servers.split()}
    assert {"--time=9:00", "--gpus-per-task=1", "-c", "8", "--ntasks=5"} <= {*of_workers.split()}


def test_what_has_spaces_and_quotes_reaches_the_script_as_it_was_given():
    worker = ("python", "it's.py", "--note", "a  b $HOME")
    script = printed("--folder", "my runs/a'b", "--stop-after", "updates=5", "--resume", "--", *worker)
    chosen = script.partition("\n# ---")[0]
    show = 'printf "%s\\n" "$folder" $resume "${server_flags[@]}" "${worker[@]}"'
    said = subprocess.run(["bash", "-c", f"{chosen}\n{show}"], capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == ["my runs/a'b", "--resume", "--stop-after", "updates=5", *worker]


def run(tmp_path: Path, *arguments: str, served: int = 0) -> subprocess.CompletedProcess[str]:
    commands = tmp_path / "commands"
    commands.mkdir()
    for name, script in COMMANDS.items():
        (commands / name).write_text(f"#!/bin/bash\n{script}\n", encoding="utf-8")
        (commands / name).chmod(0o700)
    environment = {"PATH": f"{commands}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SERVED": str(served)}
    return subprocess.run(
        ["bash"], input=printed(*arguments), env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=30
    )


def test_a_folder_s_name_is_never_run_nor_does_it_break_the_job(tmp_path):
    name = "-it's %j a\\b; touch PWNED; '$(touch PWNED)"
    show = """. "${PYPS_TLS_CA%/*}/environment" && echo "$PYPS_TLS_CA" """
    done = run(tmp_path, "--folder", f"./{name}", "--", "bash", "-c", show)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{tmp_path}/{name}/job-7.0/ca.crt" in done.stdout.splitlines()
    [look] = re.findall("^Look inside: (.*) && pyps status$", done.stdout, re.M)
    assert shlex.split(look) == [".", f"{tmp_path}/{name}/job-7.0/environment"]
    assert not (tmp_path / "PWNED").exists()
    assert "--checkpoint-dir" in (tmp_path / name / "log-of-server-0.txt").read_text(encoding="utf-8")


def test_keys_are_removed_once_the_servers_have_ended_whatever_the_workers_do(tmp_path):
    worker = "cd runs/pyps/job-*; until [ -e serving-0 ]; do sleep 0.02; done; ls; touch ../../../ended; sleep 1; ls"
    done = run(tmp_path, "--", "bash", "-c", worker)
    assert [done.stdout.count(f"{name}\n") for name in ("environment", "worker.token", "server.key")] == [2, 1, 1]


def test_keys_of_jobs_that_slurm_no_longer_has_go_with_the_folder_s_next(tmp_path):
    for name in ("job-5.0", "job-6.0", "job-7.0", "job-results"):
        (tmp_path / "runs" / "pyps" / name).mkdir(parents=True)
        (tmp_path / "runs" / "pyps" / name / "environment").touch()
    assert run(tmp_path, "--", "true").returncode == 0
    assert {path.name for path in tmp_path.glob("runs/pyps/job-*")} == {"job-6.0", "job-results"}


@pytest.mark.parametrize(("served", "says"), [(0, False), (143, False), (1, True)])
def test_workers_wait_for_servers_and_a_lost_checkpoint_is_reported(tmp_path, served, says):
    done = run(tmp_path, "--", "bash", "-c", "exit 3", served=served)
    assert done.returncode == 3
    assert ("ended without their last checkpoint" in done.stdout) == says


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--sbatch", "partition=long"), "--sbatch is 'partition=long'; expected options of sbatch's, as '--part"),
        (("--worker-sbatch", "--mem=1G\nrm x"), "expected options of sbatch's"),
        (("--worker-sbatch", "'"), "which no shell could read: No closing quotation"),
        (("--worker-sbatch", "--mem=1G -n4"), "--workers says how many workers there are"),
        (("--server-sbatch", "--nodes=4"), "--servers says how many there are, each on a node: leave out --nodes"),
        (("--sbatch", "--job-name=x"), "--run-id names the job: leave out --job-name"),
        (("--run-id", "my run"), "--run-id is 'my run'; expected letters, digits, . _ and -"),
        (("--protocol", "none"), "protocol 'none' is unknown"),
        (("--start-together", "--stop-after", "noon"), "is none of updates=N, examples=N and seconds=N"),
    ],
)
def test_nonsense_is_refused_in_a_sentence(arguments, said):
    assert said in shell("slurm", "--print", *arguments, "--", "train.py", status=2)


def test_sbatch_gets_the_script_and_may_refuse(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f"#!/bin/sh\ncat > {tmp_path}/script\nexit 7\n", encoding="utf-8")
    sbatch.chmod(0o700)
    arguments = ["--servers", "2", "--workers", "4", "--", "python", "train.py"]
    assert CliRunner().invoke(app, ["slurm", *arguments]).exit_code == 7
    assert (tmp_path / "script").read_text(encoding="utf-8") == printed(*arguments)


def test_without_sbatch_the_refusal_names_print():
    assert "take the script by --print" in shell("slurm", "--", "train.py", status=2, PATH="/nowhere")


@pytest.mark.parametrize("below", ["", "run/1"])
def test_a_file_for_a_folder_is_refused_before_the_job_is_submitted(tmp_path, below):
    file = tmp_path / "file"
    file.touch()
    assert f"but {file} is a file" in shell("slurm", "--folder", str(file / below), "--", "train.py", status=2)


def test_a_folder_with_nothing_to_resume_is_reported(tmp_path):
    arguments = ("--resume", "--folder", str(tmp_path / "none"), "--", "train.py")
    said = shell("slurm", *arguments, status=2, PATH="/nowhere")
    assert f"There is nothing to resume in {tmp_path}/none yet" in said
