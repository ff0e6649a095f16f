"""Real workers and a real server beside what the simulator says of them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pyps.cli.laboratory.advice import Way
from pyps.cli.laboratory.measure import measure_round, measure_steps, train
from pyps.cli.laboratory.settings import Settings
from pyps.cli.laboratory.sweep import Pool, grid

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


def check(script: Path, way: Way, *, workers: int, seconds: float) -> list[Compared]:
    """Run a way on this machine with so many workers beside what two, measured here under `async`, lets predict."""
    settings = replace(way.settings, protocol=way.trial.protocol, staleness=way.trial.staleness, workers=workers)
    threads = max(1, (os.cpu_count() or 1) // workers)
    settings = _predictable(script, settings, threads=threads, seconds=seconds)
    with Pool(None, 1) as pool:
        (outcome,) = pool.run(grid(settings)[0], settings)
    done = train(script, way.trial, settings, workers=workers, threads=threads, seconds=seconds)
    return [
        Compared(
            "examples/s",
            float(outcome.measured["examples_per_second"]),
            done.pushes * settings.batch_size / done.seconds,
        ),
        Compared("mean staleness", float(outcome.measured["mean_staleness"]), done.staleness / max(1.0, done.pushes)),
    ]


def _predictable(script: Path, settings: Settings, *, threads: int, seconds: float) -> Settings:
    """Return the settings of workers and a server that share this machine, as far as two workers tell.

    One worker does not tell what processes that wake each other up lose by that.
    """
    cores, size = os.cpu_count() or 1, settings.batch_size
    two = measure_steps(script, batch_size=size, at_once=min(2, cores), threads=threads)
    # Steps that are computed at once may hold each other up.
    together = two
    if min(settings.workers, cores) > 2:
        together = measure_steps(script, batch_size=size, at_once=min(settings.workers, cores), threads=threads)
    around = measure_round(script, settings, two.seconds, threads=threads, workers=min(2, settings.workers))
    step_seconds = together.seconds + around.exchange_seconds
    pushes = min(max(PUSHES_MIN, int(seconds / step_seconds)), PUSHES_MAX) * settings.workers
    return replace(
        settings,
        rate="",
        seeds=1,
        slow="",
        failures="",
        latency="0",
        bandwidth="",
        step_seconds=f"{step_seconds:.6g}",
        times=f"lognormal:{together.sigma:.3g}",
        service_seconds=around.service_for(settings.protocol),
        cores=cores / around.processors,
        examples=pushes * size,
    )
