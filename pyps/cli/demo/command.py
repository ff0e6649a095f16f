"""The command: starts the job, watches it, reports on it."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console

from pyps.cli.control import read_token
from pyps.cli.demo.picture import draw
from pyps.cli.demo.progress import Progress, ProgressReader
from pyps.cli.demo.scores import Scores
from pyps.cli.demo.screen import Screen, final_table, in_words
from pyps.cli.server_flags import check_servers_flags, spelled
from pyps.config import ConfigError
from pyps.launcher import Job, JobError, JobSettings
from pyps.launcher.environment import check_worker_variables
from pyps.units import counted
from pyps_client.observer import Observer

WANTED_ACCURACY = 0.95
# How often the run is looked at: often at its beginning, when most is learned, then every so many of its seconds.
LOOK_SECONDS = 0.05
LOOK_SECONDS_MAX = 0.25
LOOKS = 40
# The rate of updates that is shown is that of so many looks.
RATE_LOOKS = 20
WAIT_SECONDS = 0.25
# How often is said that nothing is to be seen yet.
WAITING_SECONDS = 4.0
# Workers report the loss of their last minibatch with their heartbeats: often enough for a live table.
HEARTBEAT_SECONDS = 0.5
# Lines of a child's output that are shown when it fails.
KEPT_LINES = 15
# What the worker's script can make, each with settings that suit it.
OPTIMIZERS = ("adagrad", "sgd", "momentum", "nesterov", "rmsprop", "adam", "adamw")
NEEDED = {"matplotlib": "pyps[demo]", "sklearn": "pyps[demo]", "torch": "pyps-client[torch]"}


def demo(
    workers: Annotated[int, typer.Option(help="Workers to start.", min=1, max=64)] = 4,
    servers: Annotated[int, typer.Option(help="Servers to start.", min=1, max=16)] = 2,
    epochs: Annotated[int, typer.Option(help="Passes of each worker over its part of the data.", min=1)] = 40,
    protocol: Annotated[str, typer.Option(help="How pushes become updates, as softsync:n=2 or hardsync.")] = "async",
    staleness: Annotated[str, typer.Option(help="What staleness costs a gradient, as divide or none.")] = "auto",
    optimizer: Annotated[str, typer.Option(help=f"The workers' torch optimizer: {', '.join(OPTIMIZERS)}.")] = "adagrad",
    warmup: Annotated[str, typer.Option(help="A stage before the protocol, as updates=50,protocol=serial.")] = "",
    picture: Annotated[Path, typer.Option(help="Where to save the picture.")] = Path("pyps-demo.png"),
) -> None:
    """Watch workers train a small network on real images through servers on this machine.

    By default async with Adagrad on the servers, each gradient's step divided by its staleness. Ends with
    the accuracy on images that no worker saw, a table of what staleness cost, and a picture.
    """
    if optimizer not in OPTIMIZERS:
        raise ConfigError(
            f"--optimizer is {optimizer!r}, but the demo takes one of {', '.join(OPTIMIZERS)}, "
            "with settings that suit its model"
        )
    flags = {
        "protocol": protocol,
        "staleness": staleness,
        "warmup": warmup,
        "heartbeat_seconds": str(HEARTBEAT_SECONDS),
        "expected_workers": str(workers),
    }
    told = check_servers_flags(flags, num_servers=servers)
    if told.behaviour.aggregation.coordinated:
        raise ConfigError(
            f"--protocol is {protocol!r}, but the demo's workers push gradients, which sandblaster refuses: "
            "`pyps sandblaster examples/sandblaster_digits.py` shows that one"
        )
    check_worker_variables(os.environ, count=workers)
    console = Console()
    for module, requirement in NEEDED.items():
        if importlib.util.find_spec(module) is None:
            console.print(f"pyps: the demo needs {module}: pip install '{requirement}'.", markup=False)
            raise typer.Exit(1)
    settings = JobSettings(
        command=(sys.executable, str(worker_script()), "--epochs", str(epochs), "--optimizer", optimizer, "--anneal"),
        num_servers=servers,
        num_workers=workers,
        server_flags=spelled(flags),
    )
    mode = f"{protocol}{f' after {warmup}' if warmup else ''}, staleness {told.behaviour.staleness.text}, {optimizer}"
    raise typer.Exit(Demo(settings, mode=mode, console=console, picture=picture).run())


def worker_script() -> Path:
    """examples/digits.py: beside the package in a checkout, inside it where it was installed."""
    package = Path(__file__).resolve().parents[2]
    places = (package.parent / "examples" / "digits.py", package / "examples" / "digits.py")
    return next((place for place in places if place.exists()), places[0])


def inherited_token() -> str:
    """What servers that inherit this environment ask for."""
    file = os.environ.get("PYPS_TOKEN_FILE")
    return read_token(Path(file) if file else None)


@dataclass
class History:
    """What was seen of a run over time: (seconds, value) pairs."""

    losses: list[tuple[float, float]] = field(default_factory=list)
    accuracies: list[tuple[float, float]] = field(default_factory=list)
    updates: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RATE_LOOKS))

    def updates_per_second(self) -> float:
        """Over the last looks."""
        if len(self.updates) < 2 or self.updates[-1][0] <= self.updates[0][0]:
            return 0.0
        return (self.updates[-1][1] - self.updates[0][1]) / (self.updates[-1][0] - self.updates[0][0])


class Demo:
    """One demonstration, from the start of its servers to the picture."""

    def __init__(self, settings: JobSettings, *, mode: str, console: Console, picture: Path) -> None:
        # What is shown, in a few words.
        self._mode = mode
        self._console = console
        self._picture = picture
        self._screen = Screen(console)
        self._lines: dict[str, deque[str]] = {}
        self._job = Job(settings, on_line=self._keep_line, announce=self._screen.line)
        self._scores = Scores()
        self._history = History()
        self._observer: Observer | None = None
        # When the servers first had parameters; until then the workers load torch.
        self._began_at: float | None = None
        # How it went when the servers last answered with parameters.
        self._seen: Progress | None = None

    def run(self) -> int:
        """Runs to the end and returns the exit status."""
        with self._job.handle_signals(), self._job:
            settings = self._job.settings
            self._screen.line(
                f"Starts {counted(settings.num_servers, 'server')} and {counted(settings.num_workers, 'worker')}."
            )
            try:
                self._job.start()
            except JobError as error:
                return self._fail(str(error))
            with ProgressReader([server.control for server in self._job.addresses], token=inherited_token()) as reader:
                try:
                    self._watch(reader)
                    return self._conclude(reader)
                finally:
                    if self._observer is not None:
                        self._observer.close()

    def _watch(self, reader: ProgressReader) -> None:
        settings = self._job.settings
        addresses = ",".join(server.control for server in self._job.addresses)
        self._screen.line(
            f"{counted(settings.num_workers, 'worker')} on {counted(settings.num_servers, 'server')}: {self._mode}.\n"
            f"Look inside meanwhile: pyps status --servers {addresses}"
        )
        self._screen.line("The workers load torch and the images.")
        started, told = time.monotonic(), 0
        with self._screen:
            while not self._job.done:
                self._job.wait(self._pause_seconds())
                progress = self._look(reader)
                waited = time.monotonic() - started
                if self._began_at is None and waited // WAITING_SECONDS > told:
                    told = int(waited // WAITING_SECONDS)
                    self._screen.line(f"{waited:.0f} s so far: waits for the first worker, which still loads them.")
                if progress is not None and progress.workers_finished == settings.num_workers:
                    break
        if not self._job.done:
            # A Python that has loaded torch takes seconds to take itself apart.
            self._screen.line("The training is done; the workers' processes end.")
        while not self._job.done:
            self._job.wait(WAIT_SECONDS)

    def _pause_seconds(self) -> float:
        """How long until the next look: a share of the time so far, so that a short run has enough points too."""
        seconds = time.monotonic() - self._began_at if self._began_at else 0.0
        return min(max(seconds / LOOKS, LOOK_SECONDS), LOOK_SECONDS_MAX)

    def _look(self, reader: ProgressReader) -> Progress | None:
        """Asks how it goes, notes it, shows it."""
        now = time.monotonic()
        progress = reader.read(now - (self._began_at or now))
        if progress is None or not progress.ready:
            return progress
        self._began_at = self._began_at or now
        self._seen = progress
        history = self._history
        parameters = self._snapshot()
        loss, accuracy = self._scores.loss(parameters), self._scores.accuracy(parameters)
        history.losses.append((progress.seconds, loss))
        history.accuracies.append((progress.seconds, accuracy))
        history.updates.append((progress.seconds, progress.updates))
        self._screen.show(progress, updates_per_second=history.updates_per_second(), loss=loss, accuracy=accuracy)
        return progress

    def _snapshot(self) -> Mapping[str, npt.NDArray[np.float32]]:
        if self._observer is None:
            self._observer = Observer([server.data for server in self._job.addresses], run_id=self._job.run_id)
        return self._observer.snapshot()

    def _conclude(self, reader: ProgressReader) -> int:
        job = self._job
        if job.signal_number is not None:
            self._console.print("Interrupted.")
            return job.exit_status()
        if job.exit_status() != 0:
            return self._fail("Not all workers finished.")
        progress = self._seen
        if progress is None:
            return self._fail("The servers were never seen with parameters.")
        accuracy = self._history.accuracies[-1][1]
        self._console.print(final_table(progress))
        made = f"{progress.updates} updates by {counted(len(progress.workers), 'worker')}"
        title = f"{self._mode}: {made}, accuracy {in_words(accuracy)}"
        draw(
            self._picture,
            losses=self._history.losses,
            accuracies=self._history.accuracies,
            wanted_accuracy=WANTED_ACCURACY,
            staleness=reader.staleness(),
            num_shards=progress.num_shards,
            title=title,
        )
        self._console.print(f"Picture: {self._picture.resolve()}", soft_wrap=True, highlight=False)
        verdict = f"Held-out accuracy {in_words(accuracy)} after {progress.updates} updates"
        verdict += f" in {progress.seconds:.1f} s"
        if accuracy < WANTED_ACCURACY:
            return self._fail(f"{verdict}, below the {WANTED_ACCURACY} that this training should reach.")
        self._console.print(f"{verdict}.", highlight=False)
        return 0

    def _keep_line(self, name: str, line: str) -> None:
        self._lines.setdefault(name, deque(maxlen=KEPT_LINES)).append(line)

    def _fail(self, sentence: str) -> int:
        """Shows the last lines of the children that failed, then why it ends; returns the exit status."""
        for child in self._job.servers + self._job.workers:
            if child.returncode:
                for line in self._lines.get(child.name, ()):
                    self._screen.line(f"{child.name} | {line}")
        self._screen.line(f"pyps: {sentence}")
        return 1
