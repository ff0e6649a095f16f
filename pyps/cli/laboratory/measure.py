"""What a script's step, its rounds with a server, and the processors of both take on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pyps.cli.control import Control
from pyps.cli.laboratory.settings import Settings, pulls_apart
from pyps.cli.laboratory.sweep import Pool
from pyps.cli.laboratory.trial import Trial
from pyps.core import protocols
from pyps.launcher.environment import START_SECONDS, worker_environment
from pyps.launcher.job import PYPS
from pyps.units import in_seconds
from pyps_wire.errors import ServerUnavailable
from pyps_wire.inspector_pb2 import GetStatusRequest, Status

PORTS = ("--port", "0", "--control-port", "0", "--metrics-port", "0")
END_SECONDS, POLL_SECONDS = 10.0, 0.05
STEP_SECONDS, ROUND_SECONDS = 3.0, 4.0
# Before workers are measured, so that all of them train and memory is warm.
WARM_UP_SECONDS = 3.0
# A round is measured over so many at least.
ROUNDS_MIN = 4
RUN_ID = "advise"
# A round takes the same at any rate, and a small one keeps the numbers finite.
ALONE = Trial("async", "none", 1e-6, 0)

Process = subprocess.Popen[bytes]


class Steps(NamedTuple):
    """How long a worker computes a minibatch: the mean, and the deviation of the logarithm."""

    seconds: float
    sigma: float


class Round(NamedTuple):
    """What one worker's round takes beside its step, and how many processors it and its server keep busy."""

    # The worker's part: gradients and parameters are encoded, carried and decoded.
    exchange_seconds: float
    # The server's.
    service_seconds: float
    # More than one where the server still works, for itself, while the worker goes on.
    processors: float

    def service_for(self, protocol: str) -> str:
        """Return the server's times under a protocol, as flags have them.

        A pull by itself takes it about as long as an exchange: 0.74 ms beside 0.73 ms, 0.92 ms beside 1.13 ms, with
        85,000 parameters on two cores.
        """
        pull = self.service_seconds if pulls_apart(protocols.parse(protocol)) else 0.0
        return f"{self.service_seconds:.6g},{pull:.6g}"


class Trained(NamedTuple):
    """What workers and a server on this machine did in a time."""

    seconds: float
    # Of the whole model each.
    pushes: float
    # The sum of theirs.
    staleness: float
    # Of processors.
    workers_seconds: float
    server_seconds: float


def measure_steps(script: Path, *, batch_size: int, at_once: int, threads: int) -> Steps:
    """Measure steps in so many processes at once, as workers on one machine would compute."""
    with Pool(script, at_once, threads=threads) as pool:
        logs = np.log(pool.steps(batch_size, STEP_SECONDS))
    # A few steps that the system held up say nothing of the others.
    low, high = np.quantile(logs, (0.02, 0.98))
    kept = logs[(logs >= low) & (logs <= high)]
    return Steps(float(np.exp(logs).mean()), float(kept.std()))


def measure_round(script: Path, settings: Settings, step_seconds: float, *, threads: int) -> Round:
    """Measure one real worker with a real server; `step_seconds`: of its steps, as `measure_steps` returns it."""
    seconds = max(ROUND_SECONDS, ROUNDS_MIN * step_seconds)
    alone = train(script, ALONE, settings, workers=1, threads=threads, seconds=seconds)
    processors = (alone.workers_seconds + alone.server_seconds) / alone.seconds
    service = alone.server_seconds / alone.pushes / max(1.0, processors)
    return Round(max(0.0, alone.seconds / alone.pushes - service - step_seconds), service, processors)


def train(script: Path, trial: Trial, settings: Settings, *, workers: int, threads: int, seconds: float) -> Trained:
    """Train a script with real workers, of so many threads each, and a real server; look at it for a time."""
    flags = ["--protocol", trial.protocol, "--staleness", trial.staleness, "--expected-workers", str(workers)]
    with served(*flags, "--run-id", RUN_ID) as (server, data, control_address):
        command = [sys.executable, "-m", "pyps_client.torch.problem", str(script), "--codec", settings.codec]
        command += ["--batch-size", str(settings.batch_size), "--rate", repr(trial.rate)]
        environment_of = partial(
            worker_environment,
            os.environ | {"OMP_NUM_THREADS": str(threads)},
            count=workers,
            data_addresses=[data],
            control_addresses=[control_address],
            run_id=RUN_ID,
        )
        environments = [environment_of(index=index) for index in range(workers)]
        with running("a worker on this machine", command, environments) as (processes, wait_until):

            def look() -> Trained:
                status = _status(control_address)
                taken, shards = status.tally.pushes_applied + status.tally.pushes_pending, max(1, status.num_shards)
                summed = taken * status.tally.staleness_mean
                times = _processor_seconds(processes), _processor_seconds(server)
                return Trained(time.monotonic(), taken / shards, summed / shards, *times)

            def look_at_next() -> Trained:
                """Look just after a push, so that few pushes tell their rate as well."""
                before = look().pushes
                wait_until(lambda: look().pushes > before)
                return look()

            wait_until(lambda: len(_status(control_address).roster) == workers)
            time.sleep(WARM_UP_SECONDS)
            began = look_at_next()
            time.sleep(seconds)
            ended = look_at_next()
    return Trained(*(float(last - first) for first, last in zip(began, ended, strict=True)))


def _status(address: str) -> Status:
    # A connection each: servers close one that is idle for 10 s, of which gRPC would write a line.
    with Control(address, token="") as control:
        status: Status = control.call("GetStatus", GetStatusRequest())
    return status


def _processor_seconds(processes: Sequence[Process]) -> float:
    """Return what the processes have used of processors, with all of their threads."""
    ticks = 0
    for each in processes:
        # The second field is a name in brackets, which may hold spaces.
        fields = Path(f"/proc/{each.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def served(*flags: str) -> Iterator[tuple[Sequence[Process], str, str]]:
    """Run a server on this machine while the block runs, which gets its process, data and control addresses."""
    with tempfile.TemporaryDirectory(prefix="pyps-advise-") as folder:
        ready = Path(folder, "ready.json")
        command = [*PYPS, "serve", *PORTS, "--ready-file", str(ready), "--log-level", "warning", *flags]
        with running("the server on this machine", command, [dict(os.environ)]) as (processes, wait_until):
            wait_until(ready.exists)
            addresses = json.loads(ready.read_text(encoding="utf-8"))
            yield processes, addresses["data"], addresses["control"]


@contextmanager
def running(
    what: str, command: Sequence[str], environments: Sequence[Mapping[str, str]]
) -> Iterator[tuple[Sequence[Process], Callable[[Callable[[], bool]], None]]]:
    """Run processes while the block runs, which gets them and a function that waits for a condition with them."""
    processes: list[Process] = []

    def wait_until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            if any(each.poll() is not None for each in processes) or time.monotonic() > deadline:
                raise ServerUnavailable(
                    f"{what} ended, or did nothing for {in_seconds(START_SECONDS)}: its lines say why"
                )
            if condition():
                return
            time.sleep(POLL_SECONDS)

    try:
        for environment in environments:
            processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
        yield processes, wait_until
    finally:
        for each in processes:
            each.terminate()
        for each in processes:
            try:
                each.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()
