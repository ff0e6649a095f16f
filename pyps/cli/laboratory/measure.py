"""What a script's step, its rounds with a server, and the processors of both take on this machine."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pyps.cli.laboratory.settings import Settings, pulls_apart
from pyps.cli.laboratory.sweep import Pool
from pyps.cli.laboratory.trial import Trial
from pyps.control import Control
from pyps.core import protocols
from pyps.launcher.environment import START_SECONDS, JobSettings, spelled
from pyps.launcher.job import Job, JobError
from pyps.launcher.process import ChildProcess
from pyps.units import in_seconds
from pyps_wire.errors import ServerUnavailable
from pyps_wire.inspector_pb2 import GetStatusRequest, Status

POLL_SECONDS = 0.05
# Of the processes, to be told where one of them fails.
LINES = 20
STEP_SECONDS, ROUND_SECONDS = 3.0, 4.0
# Before workers are measured, so that all of them train and memory is warm.
WARM_UP_SECONDS = 3.0
# A round is measured over so many at least.
ROUNDS_MIN = 4
# Nobody waits for others. A round takes the same at any rate, and a small one keeps the numbers finite.
FREE = Trial("async", "none", 1e-6, 0)


class Steps(NamedTuple):
    """How long a worker computes a minibatch: the mean, and the deviation of the logarithm."""

    seconds: float
    sigma: float


class Round(NamedTuple):
    """What a worker's round takes beside its step, and how many processors it and its server's part keep busy."""

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


def measure_round(script: Path, settings: Settings, step_seconds: float, *, threads: int, workers: int = 1) -> Round:
    """Measure real workers with a real server; `step_seconds`: of their steps, as `measure_steps` returns it."""
    seconds = max(ROUND_SECONDS, ROUNDS_MIN * step_seconds)
    done = train(script, FREE, settings, workers=workers, threads=threads, seconds=seconds)
    processors = (done.workers_seconds + done.server_seconds) / done.seconds / workers
    service = done.server_seconds / done.pushes / max(1.0, processors)
    return Round(max(0.0, workers * done.seconds / done.pushes - service - step_seconds), service, processors)


def train(script: Path, trial: Trial, settings: Settings, *, workers: int, threads: int, seconds: float) -> Trained:
    """Train a script with real workers, of so many threads each, and a real server; look at it for a time."""
    flags = {"protocol": trial.protocol, "staleness": trial.staleness, "expected_workers": str(workers)}
    command = [sys.executable, "-m", "pyps_client.torch.problem", str(script), "--codec", settings.codec]
    command += ["--batch-size", str(settings.batch_size), "--rate", repr(trial.rate), "--threads", str(threads)]
    with launched(command, workers=workers, flags=flags) as (job, wait_until):

        def look() -> Trained:
            status = status_of(job)
            taken, shards = status.tally.pushes_applied + status.tally.pushes_pending, max(1, status.num_shards)
            summed = taken * status.tally.staleness_mean
            times = _processor_seconds(job.workers), _processor_seconds(job.servers)
            return Trained(time.monotonic(), taken / shards, summed / shards, *times)

        def look_at_next() -> Trained:
            """Look just after a push, so that few pushes tell their rate as well."""
            before = look().pushes
            wait_until(lambda: look().pushes > before)
            return look()

        wait_until(lambda: len(status_of(job).roster) == workers)
        time.sleep(WARM_UP_SECONDS)
        began = look_at_next()
        time.sleep(seconds)
        ended = look_at_next()
    return Trained(*(float(last - first) for first, last in zip(began, ended, strict=True)))


@contextmanager
def launched(
    command: Sequence[str], *, workers: int, flags: Mapping[str, str]
) -> Iterator[tuple[Job, Callable[[Callable[[], bool]], None]]]:
    """Run a server, with flags by their names, and workers while the block runs.

    The block gets their job, and a function that waits for a condition with them. ServerUnavailable where one of them
    ends.
    """
    lines = deque[str](maxlen=LINES)
    settings = JobSettings(tuple(command), num_workers=workers, server_flags=spelled({**flags, "log_level": "warning"}))
    with Job(settings, on_line=lambda name, line: lines.append(f"{name}: {line}"), announce=lines.append) as job:

        def wait_until(condition: Callable[[], bool]) -> None:
            deadline = time.monotonic() + START_SECONDS
            while all(child.running for child in (*job.servers, *job.workers)) and time.monotonic() < deadline:
                if condition():
                    return
                job.wait(POLL_SECONDS)
            why = f"a process on this machine ended, or all did nothing for {in_seconds(START_SECONDS)}"
            raise ServerUnavailable("\n".join([*lines, why]))

        try:
            job.start()
        except JobError as error:
            raise ServerUnavailable("\n".join([*lines, str(error)])) from None
        yield job, wait_until


def status_of(job: Job) -> Status:
    # A connection each: servers close one that is idle for 10 s, of which gRPC would write a line.
    with Control(job.addresses[0].control, token="") as control:
        status: Status = control.call("GetStatus", GetStatusRequest())
    return status


def _processor_seconds(processes: Sequence[ChildProcess]) -> float:
    """Return what the processes have used of processors, with all of their threads."""
    ticks = 0
    for each in processes:
        # The second field is a name in brackets, which may hold spaces.
        fields = Path(f"/proc/{each.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
