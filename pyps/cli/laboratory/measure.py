"""What a script's step and this machine's links take."""

from __future__ import annotations

import json
import logging
import math
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pyps.cli.bench import Rounds, Setup, measure_rounds
from pyps.cli.laboratory.sweep import Pool
from pyps.launcher.environment import START_SECONDS
from pyps.launcher.job import PYPS
from pyps_wire.errors import ServerUnavailable

# A round of so few numbers takes the latencies and the server's Python alone.
SMALL = 100
PORTS = ("--port", "0", "--control-port", "0", "--metrics-port", "0")
END_SECONDS, POLL_SECONDS = 10.0, 0.05
STEP_SECONDS, LINK_SECONDS = 3.0, 1.0


class Steps(NamedTuple):
    """How long a worker computes a minibatch: the mean, and the deviation of the logarithm."""

    seconds: float
    sigma: float


class Link(NamedTuple):
    latency_seconds: float
    bytes_per_second: float

    @property
    def in_words(self) -> str:
        """The bandwidth as flags have it."""
        return f"{self.bytes_per_second / 1e6:.3f}MB" if math.isfinite(self.bytes_per_second) else ""


def measure_steps(script: Path, *, batch_size: int, at_once: int, threads: int) -> Steps:
    """Measure steps in so many processes at once, as workers on one machine would compute."""
    with Pool(script, at_once, threads=threads) as pool:
        logs = np.log(pool.steps(batch_size, STEP_SECONDS))
    # A few steps that the system held up say nothing of the others.
    low, high = np.quantile(logs, (0.02, 0.98))
    kept = logs[(logs >= low) & (logs <= high)]
    return Steps(float(np.exp(logs).mean()), float(kept.std()))


def measure_link(num_parameters: int) -> Link:
    """Measure rounds of a worker with a server on this machine, and what of them the numbers take."""
    rounds, sizes = list[Rounds](), (num_parameters, SMALL)
    with served() as (address, _), _quiet():
        measure_rounds(rounds, (address,), "", [Setup("auto", "float32")], sizes=sizes, seconds=LINK_SECONDS)
    large, small = (statistics.median(each.seconds) for each in rounds)
    # Both ways one after the other, with the server's update between.
    moving = max(large - small, 1e-9)
    return Link(small / 2, 2 * 4 * max(0, num_parameters - SMALL) / moving if num_parameters > SMALL else math.inf)


@contextmanager
def _quiet() -> Iterator[None]:
    """Log only warnings of the client while the block runs."""
    logger = logging.getLogger("pyps.client")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def served(*flags: str) -> Iterator[tuple[str, str]]:
    """Run a server on this machine while the block runs, which gets its data and control addresses."""
    with tempfile.TemporaryDirectory(prefix="pyps-check-") as folder:
        ready = Path(folder, "ready.json")
        command = [*PYPS, "serve", *PORTS, "--ready-file", str(ready), "--log-level", "warning", *flags]
        with running([(command, dict(os.environ))]) as alive:
            deadline = time.monotonic() + START_SECONDS
            while not ready.exists():
                if not alive() or time.monotonic() > deadline:
                    raise ServerUnavailable("the server on this machine ended, or did not serve: its lines say why")
                time.sleep(POLL_SECONDS)
            addresses = json.loads(ready.read_text(encoding="utf-8"))
            yield addresses["data"], addresses["control"]


@contextmanager
def running(commands: list[tuple[list[str], dict[str, str]]]) -> Iterator[Callable[[], bool]]:
    """Run processes while the block runs; it gets a function that returns whether all still run."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command, environment in commands:
            started.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
        yield lambda: all(each.poll() is None for each in started)
    finally:
        for each in started:
            each.terminate()
        for each in started:
            try:
                each.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()
