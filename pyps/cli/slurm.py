"""`pyps slurm`: a batch script for a job of servers and workers under Slurm, printed or submitted."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from pyps.cli.run import SERVERS_MAX, Kept, check_servers_flags, spelled
from pyps.cli.serve import with_settings
from pyps.config import ConfigError
from pyps.launcher.environment import check_worker_variables

WORKERS_MAX = 10_000
# What follows the worker's program is the worker's, --flags too.
CONTEXT_SETTINGS = {"allow_interspersed_args": False}
# Options of sbatch's that the script itself sets: for all nodes, and for the servers'.
_OWN = {
    **dict.fromkeys(("--ntasks", "-n"), "--workers says how many workers there are, and --servers how many servers"),
    **dict.fromkeys(("--job-name", "-J"), "--run-id names the job"),
}
_OWN_OF_SERVERS = _OWN | dict.fromkeys(
    ("--nodes", "-N", "--ntasks-per-node"), "--servers says how many there are, each on a node"
)
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@with_settings(
    *("protocol", "warmup", "staleness", "optimizer", "schedule", "epoch_examples", "batch_growth", "clip_norm"),
    *("bounds", "stall_seconds", "start_together", "stop_after", "checkpoint_seconds"),
)
def slurm(
    command: Annotated[list[str], typer.Argument(help="What each worker runs, behind --.", show_default=False)],
    servers: Annotated[int, typer.Option(help="Servers, each on a node of its own.", min=1, max=SERVERS_MAX)] = 2,
    workers: Annotated[int, typer.Option(help="Workers, each a task.", min=1, max=WORKERS_MAX)] = 1,
    run_id: Annotated[str, typer.Option(help="The name of the run, and of the job.")] = "pyps",
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder that all nodes see, for checkpoints, the servers' logs, and keys while the job runs; "
            "by default runs/ and the run's name.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the newest checkpoint in the folder.")] = False,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTIONS", help="Options of sbatch for all nodes, as '--partition=long --time=9:00:00'."),
    ] = None,
    server_sbatch: Annotated[
        list[str] | None, typer.Option(metavar="OPTIONS", help="The same for the servers' nodes alone.")
    ] = None,
    worker_sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTIONS", help="The same for the workers', as '--gpus-per-task=1 --cpus-per-task=8'."),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with more settings of the servers.")] = None,
    only_print: Annotated[bool, typer.Option("--print", help="Print the script instead of submitting it.")] = False,
    **settings: str | bool | None,
) -> None:
    """Submit a job to Slurm: servers and workers on nodes of their own, until the workers are done.

    Its exit status is the workers'. scancel, preemption, the time limit and the loss of a server's node leave
    checkpoints in the folder; a job that Slurm requeues continues them by itself, a new one with --resume.
    """
    folder = folder or Path("runs", run_id)
    if not _RUN_ID.fullmatch(run_id):
        raise ConfigError(f"--run-id is {run_id!r}; expected letters, digits, . _ and -, as it names the job too")
    check_servers_flags({**settings, "expected_workers": str(workers)}, config, num_servers=servers)
    check_worker_variables(os.environ, count=workers)
    for_all = _lines("--sbatch", sbatch, refused=_OWN)
    script = _SCRIPT.format(
        run_id=run_id,
        servers=servers,
        workers=workers,
        server_sbatch=for_all + _lines("--server-sbatch", server_sbatch, refused=_OWN_OF_SERVERS),
        worker_sbatch=for_all + _lines("--worker-sbatch", worker_sbatch, refused=_OWN),
        folder=shlex.quote(str(folder)),
        resume="--resume" if resume else "",
        server_flags=shlex.join(spelled(settings, config)),
        worker=shlex.join(command),
    )
    script += _BODY
    if only_print:
        typer.echo(script, nl=False)
        return
    kept = Kept(folder, tuple(folder / f"server-{index}" for index in range(servers)))
    if resume:
        kept.check_servers()
    elif kept.found:
        raise ConfigError(f"{folder} holds a run already: continue it with --resume, or name another --folder")
    raise typer.Exit(_submit(script))


def _lines(flag: str, given: Sequence[str] | None, *, refused: Mapping[str, str]) -> str:
    """The script's lines for options of sbatch's, which are refused where they would not do what they say."""
    for text in given or ():
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise ConfigError(f"{flag} is {text!r}, which no shell could read: {error}") from None
        if "\n" in text or not words or not words[0].startswith("-"):
            raise ConfigError(f"{flag} is {text!r}; expected options of sbatch's, as '--partition=long --mem=16G'")
        for word in words:
            name = word[:2] if re.match(r"-\w", word) else word.partition("=")[0]
            if name in refused:
                raise ConfigError(f"{flag} is {text!r}, but {refused[name]}: leave out {name}")
    return "".join(f"#SBATCH {text}\n" for text in given or ())


def _submit(script: str) -> int:
    """Hands the script to sbatch, which says the job's number; returns its exit status."""
    program = shutil.which("sbatch")
    if program is None:
        raise ConfigError(
            "sbatch is not on the PATH: submit on a machine of the cluster, or take the script by --print"
        )
    environment = dict(os.environ)
    if not {"VIRTUAL_ENV", "CONDA_PREFIX"} & environment.keys():
        # Jobs inherit the PATH: `.venv/bin/pyps slurm -- python train.py` means that environment's programs.
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    return subprocess.run([program], input=script, text=True, env=environment, check=False).returncode


_SCRIPT = """\
#!/bin/bash
# A job of servers and workers, as `pyps slurm --print` writes it. What is to be chosen stands here, above the line.
#SBATCH --job-name={run_id} --requeue --open-mode=append
#SBATCH --no-kill --nodes={servers} --ntasks-per-node=1
{server_sbatch}#SBATCH hetjob
#SBATCH --no-kill --ntasks={workers}
{worker_sbatch}
export PYPS_RUN_ID={run_id}
# Seen by all nodes: checkpoints, logs, and keys while the job runs.
folder={folder}
# --resume continues what is there; a requeued job does by itself.
resume={resume}
server_flags=({server_flags})
worker=({worker})
# ----------------------------------------------------------------------------------------------------------------------
"""
_BODY = r"""
set -e
export PYPS_PROCESS_HOOKS=1 PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK_HET_GROUP_1:-1}}
# A server that is gone for longer comes back with the whole job only.
export PYPS_LOSS_WAIT_SECONDS=${PYPS_LOSS_WAIT_SECONDS:-120}
[ "${SLURM_RESTART_COUNT:-0}" = 0 ] || resume=--resume

# A certificate for the servers' nodes and two tokens, for this life of the job; other users cannot read them.
mkdir -p "$folder" && folder=$(realpath "$folder")
keys=$folder/job-$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
rm -rf "$folder/job-$SLURM_JOB_ID".*
mkdir -m 700 "$keys"
trap 'rm -rf "$keys"' EXIT
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_0")
pyps certs init --folder "$keys" $(printf -- '--host %s ' $nodes) >/dev/null
for role in worker operator; do
  od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$keys/$role.token"
done
# Four ports below those that the system gives away; jobs that share a node have others.
port=$((20000 + SLURM_JOB_ID % 3000 * 4))
cat >"$keys/environment" <<END
export PYPS_RUN_ID='$PYPS_RUN_ID'
export PYPS_SERVERS=$(printf "%s:$port\n" $nodes | paste -sd,)
export PYPS_CONTROL=$(printf "%s:$((port + 1))\n" $nodes | paste -sd,)
export PYPS_TLS_CA='$keys/ca.crt'
export PYPS_TOKEN_FILE='$keys/worker.token'
export PYPS_OPERATOR_TOKEN_FILE='$keys/operator.token'
END
. "$keys/environment"
echo "Look inside: . '$keys/environment' && pyps status"

# Runs a component's tasks, with the processors that were asked for: srun does not know by itself.
step() {
  local cpus=SLURM_CPUS_PER_TASK_HET_GROUP_$1
  exec srun --het-group="$1" --mpi=none ${!cpus:+--cpus-per-task=${!cpus}} "${@:2}"
}
# srun would kill the tasks at a signal of its own: these go by scancel, or come from Slurm to all.
signalled=
trap 'signalled=1' TERM

step 0 --kill-on-bad-exit=1 --open-mode=append --output="$folder/log-of-server-%t.txt" \
  bash -c 'exec pyps serve --checkpoint-dir "$0/server-$SLURM_PROCID" "$@"' "$folder" $resume \
  --host 0.0.0.0 --port $port --control-port $((port + 1)) --metrics-port $((port + 2)) --lane-port $((port + 3)) \
  --tls-cert "$keys/server.crt" --tls-key "$keys/server.key" --expected-workers "$SLURM_NTASKS_HET_GROUP_1" \
  "${server_flags[@]}" &
servers=$!

# Whether Slurm has taken a dead node of the servers' out of the job, and not yet ended it.
lost_a_server() {
  local nodes=$(squeue --noheader --jobs="$SLURM_JOB_ID" --states=running --format=%N)
  [ "$nodes" ] && ! grep -qxF "$SLURM_JOB_NODELIST_HET_GROUP_0" <<<"$nodes"
}
export -f lost_a_server
# A worker that ends because the first server's node died, and this script with it, puts the job back in the queue.
step 1 --no-kill --kill-on-bad-exit=0 --wait=0 --label \
  bash -c '
    trap : TERM
    export PYPS_WORKER_INDEX=$SLURM_PROCID PYPS_WORKER_COUNT=$SLURM_NTASKS PYPS_WORKER_ID=worker-$SLURM_PROCID
    # Lightning would make one worker of all tasks.
    unset SLURM_NTASKS
    "$@" && exit
    status=$?
    ! lost_a_server || scontrol requeue "$SLURM_JOB_ID"
    exit $status' worker "${worker[@]}" &
workers=$!

running() { kill -0 "$1" 2>/dev/null; }
# The status of a step, at its end: a signal ends `wait` too.
status_of() {
  while running "$1"; do wait "$1" || :; done
  wait "$1"
}
while running $servers && running $workers; do wait -n || :; done
if running $servers; then
  status_of $workers && status=0 || status=$?
  [ "$signalled" ] || scancel --signal=TERM "$SLURM_JOB_ID"
  status_of $servers && exit $status
  echo "The servers ended without their last checkpoint; $folder/log-of-server-*.txt say why."
  exit $((status ? status : 1))
fi
if lost_a_server; then
  echo "A server's node died: the job starts again from the newest checkpoints."
  scontrol requeue "$SLURM_JOB_ID"
elif [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --states=running)" ]; then
  echo "A server ended, and the run cannot go on without it; $folder/log-of-server-*.txt say why."
  scancel --signal=TERM "$SLURM_JOB_ID"
fi
status_of $workers || :
exit 1
"""
