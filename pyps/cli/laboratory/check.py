"""Real workers and a real server beside what the simulator says of them."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pyps.cli.control import Control
from pyps.cli.laboratory.advice import Way
from pyps.cli.laboratory.measure import POLL_SECONDS, Link, Steps, running, served
from pyps.cli.laboratory.sweep import Pool, grid
from pyps.launcher.environment import START_SECONDS, worker_environment
from pyps_wire.errors import ServerUnavailable
from pyps_wire.inspector_pb2 import GetStatusRequest, Status

# Before it is measured, so that all workers train and memory is warm.
WARM_UP_SECONDS = 5.0
RUN_ID = "advise-check"
# Simulated pushes of each worker.
PUSHES_MIN, PUSHES_MAX = 200, 5_000


class Compared(NamedTuple):
    what: str
    predicted: float
    measured: float

    @property
    def off(self) -> float:
        """How far the prediction is off, as a share of what was measured."""
        return self.predicted / self.measured - 1 if self.measured else 0.0


def check(script: Path, way: Way, *, workers: int, seconds: float, steps: Steps, link: Link) -> list[Compared]:
    """Run a way on this machine with so many workers, and predict it from the step and the link measured here."""
    pushes = min(max(PUSHES_MIN, int(seconds / steps.seconds)), PUSHES_MAX) * workers
    settings = replace(
        way.settings,
        workers=workers,
        protocol=way.trial.protocol,
        staleness=way.trial.staleness,
        rate="",
        seeds=1,
        slow="",
        failures="",
        step_seconds=f"{steps.seconds:.6g}",
        times=f"lognormal:{steps.sigma:.3g}",
        latency=f"{link.latency_seconds:.6g}",
        bandwidth=link.in_words,
        examples=pushes * way.settings.batch_size,
    )
    with Pool(None, 1) as pool:
        (outcome,) = pool.run(grid(settings)[0], settings)
    before, after, took = _measure(script, way, workers, seconds)
    pushed = (_taken(after) - _taken(before)) / after.num_shards
    return [
        Compared("examples/s", float(outcome.measured["examples_per_second"]), pushed * settings.batch_size / took),
        Compared("mean staleness", float(outcome.measured["mean_staleness"]), _staleness(before, after)),
    ]


def _taken(status: Status) -> int:
    return status.tally.pushes_applied + status.tally.pushes_pending


def _staleness(before: Status, after: Status) -> float:
    """Return the mean of what was taken between the two."""
    summed = [each.tally.staleness_mean * _taken(each) for each in (before, after)]
    return (summed[1] - summed[0]) / max(1, _taken(after) - _taken(before))


def _measure(script: Path, way: Way, workers: int, seconds: float) -> tuple[Status, Status, float]:
    flags = ["--protocol", way.trial.protocol, "--staleness", way.trial.staleness, "--expected-workers", str(workers)]
    flags += ["--run-id", RUN_ID]
    with served(*flags) as (data, control_address), Control(control_address, token="") as control:
        command = [sys.executable, "-m", "pyps_client.torch.problem", str(script)]
        command += ["--batch-size", str(way.settings.batch_size), "--rate", repr(way.trial.rate)]
        command += ["--codec", way.settings.codec]
        environment_of = partial(
            worker_environment,
            os.environ,
            count=workers,
            data_addresses=[data],
            control_addresses=[control_address],
            run_id=RUN_ID,
        )
        started = [(command, environment_of(index=index)) for index in range(workers)]
        with running(started) as alive:
            deadline = time.monotonic() + START_SECONDS
            while len(_status(control).roster) < workers:
                if not alive() or time.monotonic() > deadline:
                    raise ServerUnavailable("a worker of the check ended, or did not train in time: its lines say why")
                time.sleep(POLL_SECONDS)
            time.sleep(WARM_UP_SECONDS)
            before, began = _status(control), time.monotonic()
            time.sleep(seconds)
            after, took = _status(control), time.monotonic() - began
            if not alive():
                raise ServerUnavailable("a worker of the check ended meanwhile: its lines say why")
            return before, after, took


def _status(control: Control) -> Status:
    status: Status = control.call("GetStatus", GetStatusRequest())
    return status
