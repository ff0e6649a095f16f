"""`pyps demo`: workers train on real images through servers of their own, watched from their start to their end."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pyps.cli.control import Control, inherited_token
from pyps.cli.run import check_servers_flags, spelled
from pyps.cli.status import merged, taken
from pyps.config import ConfigError
from pyps.launcher import Job, JobError, JobSettings
from pyps.launcher.environment import check_worker_variables
from pyps.units import counted
from pyps_client.arrays import Observer
from pyps_wire import inspector_pb2 as pb
from pyps_wire.common_pb2 import RUN_STATE_FINISHED, RUN_STATE_READY
from pyps_wire.errors import PypsError

WANTED_ACCURACY = 0.95
# How often the run is looked at: often at its beginning, when most is learned, then every so many of its seconds.
LOOK_SECONDS = 0.05
LOOK_SECONDS_MAX = 0.25
LOOKS = 40
# The rate of updates that is shown is that of so many looks.
RATE_LOOKS = 20
CALL_SECONDS = 2.0
# How often is said that nothing is to be seen yet, and how it goes where there is no terminal.
WAITING_SECONDS = 4.0
LINE_SECONDS = 2.0
# Workers report the loss of their last minibatch with their heartbeats: often enough for a live table.
HEARTBEAT_SECONDS = 0.5
# Lines of a child's output that are shown when it fails.
KEPT_LINES = 15
# What the worker's script can make, each with settings that suit it.
OPTIMIZERS = ("adagrad", "sgd", "momentum", "nesterov", "rmsprop", "adam", "adamw")
NEEDED = {"matplotlib": ".[demo]", "sklearn": ".[demo]", "torch": "./client[torch]"}
# As in examples/digits.py.
HELD_OUT = 360
SPLIT_SEED = 42
# Of the gradients; a few stragglers would make the histogram all tail.
SHOWN_SHARE = 0.99
# The histogram's axis reaches at least this far: a lone bar at zero must look like a bar.
LEAST_SPAN = 5

Array = npt.NDArray[np.float32]


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
    resolved = check_servers_flags(flags, num_servers=servers)
    behaviour = resolved.behaviour
    if behaviour.aggregation.coordinated:
        raise ConfigError(
            f"--protocol is {protocol!r}, but the demo's workers push gradients, which sandblaster refuses: "
            "`pyps sandblaster examples/sandblaster_digits.py` shows that one"
        )
    check_worker_variables(os.environ, count=workers)
    console = Console()
    for module, requirement in NEEDED.items():
        if importlib.util.find_spec(module) is None:
            remedy = f"pip install '{requirement}' in a clone of pyps."
            console.print(f"pyps: the demo needs {module}: {remedy}", markup=False)
            raise typer.Exit(1)
    settings = JobSettings(
        command=(sys.executable, str(worker_script()), "--epochs", str(epochs), "--optimizer", optimizer, "--anneal"),
        num_servers=servers,
        num_workers=workers,
        lanes=resolved.lane_port != "off",
        server_flags=spelled(flags),
    )
    mode = f"{protocol}{f' after {warmup}' if warmup else ''}, staleness {behaviour.staleness.text}, {optimizer}"
    raise typer.Exit(Demo(settings, mode=mode, console=console, picture=picture).run())


def worker_script() -> Path:
    """examples/digits.py: beside the package in a checkout, inside it where it was installed."""
    package = Path(__file__).resolve().parents[1]
    places = (package.parent / "examples" / "digits.py", package / "examples" / "digits.py")
    return next((place for place in places if place.exists()), places[0])


class Point(NamedTuple):
    """The run at one moment, as the picture shows it."""

    seconds: float
    updates: int
    loss: float
    accuracy: float


class Demo:
    """One demonstration, from the start of its servers to the picture."""

    def __init__(self, settings: JobSettings, *, mode: str, console: Console, picture: Path) -> None:
        # What is shown, in a few words.
        self._mode = mode
        self._console = console
        self._picture = picture
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._line_due = 0.0
        self._lines: dict[str, deque[str]] = {}
        self._job = Job(settings, on_line=self._keep_line, announce=self._say)
        self._images = Images()
        self._controls: list[Control] = []
        self._observer: Observer | None = None
        # When the servers first had parameters; until then the workers load torch.
        self._began_at: float | None = None
        self._points: list[Point] = []
        # What the servers said when they last answered with parameters.
        self._seen: Answers | None = None

    def run(self) -> int:
        """Runs to the end and returns the exit status."""
        settings = self._job.settings
        with self._job.handle_signals(), self._job, contextlib.ExitStack() as connections:
            servers, workers = counted(settings.num_servers, "server"), counted(settings.num_workers, "worker")
            self._say(f"Starts {servers} and {workers}.")
            try:
                self._job.start()
            except JobError as error:
                return self._fail(str(error))
            for server in self._job.addresses:
                self._controls.append(connections.enter_context(Control(server.control, token=inherited_token())))
            self._say(
                f"{workers} on {servers}: {self._mode}.\n"
                f"Look inside meanwhile: pyps status --servers {','.join(one.control for one in self._job.addresses)}\n"
                "The workers load torch and the images."
            )
            self._watch(connections)
            return self._conclude()

    def _watch(self, connections: contextlib.ExitStack) -> None:
        started, told, finished = time.monotonic(), 0, 0
        with self._live or contextlib.nullcontext():
            while not self._job.done and finished < self._job.settings.num_workers:
                # A share of the time so far, so that a short run has enough points too.
                seconds = time.monotonic() - (self._began_at or time.monotonic())
                self._job.wait(min(max(seconds / LOOKS, LOOK_SECONDS), LOOK_SECONDS_MAX))
                with contextlib.suppress(PypsError):
                    finished = self._look(connections)
                waited = time.monotonic() - started
                if self._began_at is None and waited // WAITING_SECONDS > told:
                    told = int(waited // WAITING_SECONDS)
                    self._say(f"{waited:.0f} s so far: waits for the first worker, which still loads them.")
        if not self._job.done:
            # A Python that has loaded torch takes seconds to take itself apart.
            self._say("The training is done; the workers' processes end.")
        while not self._job.done:
            self._job.wait(LOOK_SECONDS_MAX)

    def _look(self, connections: contextlib.ExitStack) -> int:
        """Asks how it goes, notes it, shows it; returns how many workers have finished."""
        statuses = self._ask("GetStatus", pb.GetStatusRequest())
        answers = Answers(statuses, by_worker(self._ask("ListWorkers", pb.ListWorkersRequest())))
        if all(status.state in (RUN_STATE_READY, RUN_STATE_FINISHED) for status in statuses):
            if self._observer is None:
                data = [server.data for server in self._job.addresses]
                self._observer = connections.enter_context(Observer(data, run_id=self._job.run_id))
            self._began_at = self._began_at or time.monotonic()
            loss, accuracy = self._images.score(self._observer.snapshot())
            self._points.append(Point(time.monotonic() - self._began_at, answers.updates, loss, accuracy))
            self._seen = answers
            self._show(answers)
        return sum(known[0].state == "finished" for known in answers.workers.values())

    def _ask(self, method: str, request: Any) -> list[Any]:
        return [control.call(method, request, timeout_seconds=CALL_SECONDS) for control in self._controls]

    def _show(self, answers: Answers) -> None:
        """A picture that renews itself on a terminal, a line now and then elsewhere."""
        newest, earlier = self._points[-1], self._points[-RATE_LOOKS:][0]
        seconds = newest.seconds - earlier.seconds
        rate = (newest.updates - earlier.updates) / seconds if seconds else 0.0
        # Narrow enough for a terminal of 80 columns.
        tally = merged([status.tally for status in answers.statuses])
        headline = (
            f"{newest.seconds:4.1f} s  update {newest.updates:4d}  {rate:3.0f}/s  "
            f"staleness {tally.staleness_mean:.1f} (max {tally.staleness_max})  "
            f"loss {newest.loss:.3f}  accuracy {newest.accuracy:.3f}"
        )
        if self._live is not None:
            self._live.update(Group(live_table(answers), Text(headline)), refresh=True)
        elif newest.seconds >= self._line_due:
            self._line_due = newest.seconds + LINE_SECONDS
            self._say(headline)

    def _conclude(self) -> int:
        job = self._job
        if job.signal_number is not None:
            self._say("Interrupted.")
            return job.exit_status()
        if job.exit_status() != 0:
            return self._fail("Not all workers finished.")
        if self._seen is None:
            return self._fail("The servers were never seen with parameters.")
        self._console.print(final_table(self._seen))
        last = self._points[-1]
        made = f"{last.updates} updates by {counted(len(self._seen.workers), 'worker')}"
        staleness: Counter[int] = Counter()
        for histogram in self._ask("GetStaleness", pb.GetStalenessRequest()):
            staleness.update({bucket.staleness: bucket.count for bucket in histogram.buckets})
        title = f"{self._mode}: {made}, accuracy {last.accuracy:.3f}"
        draw(self._picture, self._points, staleness, num_shards=self._seen.num_shards, title=title)
        self._say(f"Picture: {self._picture.resolve()}")
        verdict = f"Held-out accuracy {last.accuracy:.3f} after {last.updates} updates in {last.seconds:.1f} s"
        if last.accuracy < WANTED_ACCURACY:
            return self._fail(f"{verdict}, below the {WANTED_ACCURACY} that this training should reach.")
        self._say(f"{verdict}.")
        return 0

    def _keep_line(self, name: str, line: str) -> None:
        self._lines.setdefault(name, deque(maxlen=KEPT_LINES)).append(line)

    def _say(self, text: str) -> None:
        """A line above the picture that stays."""
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)

    def _fail(self, sentence: str) -> int:
        """Shows the last lines of the children that failed, then why it ends; returns the exit status."""
        for child in self._job.servers + self._job.workers:
            if child.returncode:
                for line in self._lines.get(child.name, ()):
                    self._say(f"{child.name} | {line}")
        self._say(f"pyps: {sentence}")
        return 1


@dataclass(frozen=True)
class Answers:
    """What all servers said at one moment: of themselves, and of each worker by its name."""

    statuses: Sequence[pb.Status]
    workers: Mapping[str, Sequence[pb.WorkerInfo]]

    @property
    def updates(self) -> int:
        """The run's updates: a shard's version, of the one that is ahead."""
        return max(status.version_max for status in self.statuses)

    @property
    def num_shards(self) -> int:
        """The shards of all servers."""
        return sum(status.num_shards for status in self.statuses)

    def pushes(self, known: Sequence[pb.WorkerInfo]) -> float:
        """A worker's pushes, each of which has a part for every shard; before the run is initialised there are none."""
        return taken(merged([one.tally for one in known])) / self.num_shards if self.num_shards else 0.0


def by_worker(listings: Sequence[pb.ListWorkersReply]) -> dict[str, list[pb.WorkerInfo]]:
    """What each server knows of a worker, by its name, in the order of the names."""
    found: dict[str, list[pb.WorkerInfo]] = {}
    for worker in sorted((one for listing in listings for one in listing.workers), key=lambda one: one.worker_id):
        found.setdefault(worker.worker_id, []).append(worker)
    return found


def live_table(answers: Answers) -> Table:
    """The workers while they train."""
    lowest = min(status.version_min for status in answers.statuses)
    table = Table(title=f"versions {lowest} to {answers.updates}", title_justify="left")
    for name in ("worker", "state", "steps", "loss", "staleness mean", "max"):
        table.add_column(name, justify="left" if name in ("worker", "state") else "right")
    for name, known in answers.workers.items():
        losses = [one.scalars["loss"] for one in known if "loss" in one.scalars]
        tally = merged([one.tally for one in known])
        table.add_row(
            name,
            known[0].state,
            str(max(one.clock for one in known)),
            f"{losses[-1]:.3f}" if losses else "",
            f"{tally.staleness_mean:.2f}",
            str(tally.staleness_max),
        )
    return table


def final_table(answers: Answers) -> Table:
    """What each worker gave and what staleness took of it."""
    table = Table(title="What staleness cost", title_justify="left")
    table.add_column("worker")
    for name in ("pushes", "mean staleness", "step size lost to staleness"):
        table.add_column(name, justify="right")

    def add(name: str, pushes: float, tellers: Sequence[pb.Status] | Sequence[pb.WorkerInfo]) -> None:
        tally = merged([teller.tally for teller in tellers])
        table.add_row(name, f"{pushes:.0f}", f"{tally.staleness_mean:.2f}", f"{tally.step_lost:.0%}")

    for name, known in answers.workers.items():
        add(name, answers.pushes(known), known)
    table.add_section()
    add("all", sum(map(answers.pushes, answers.workers.values())), answers.statuses)
    return table


class Images:
    """The images that workers train on, and the 360 that no worker sees."""

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        order = np.random.RandomState(SPLIT_SEED).permutation(len(labels))
        self._pixels: Array = (images[order] / 16).astype(np.float32)
        self._labels = labels[order]

    def score(self, parameters: Mapping[str, Array]) -> tuple[float, float]:
        """The mean cross-entropy over all images of the training, and the share of the held-out ones that are right.

        In nats; the loss of a minibatch is far noisier.
        """
        hidden = np.maximum(self._pixels @ parameters["0.weight"].T + parameters["0.bias"], 0)
        scores = hidden @ parameters["2.weight"].T + parameters["2.bias"]
        accuracy = (scores[:HELD_OUT].argmax(axis=1) == self._labels[:HELD_OUT]).mean()
        scores -= scores.max(axis=1, keepdims=True)
        losses = np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(len(scores)), self._labels]
        return float(losses[HELD_OUT:].mean()), float(accuracy)


def draw(path: Path, points: Sequence[Point], staleness: Counter[int], *, num_shards: int, title: str) -> None:
    """Writes a picture to `path`: loss and accuracy over time, and how stale the gradients were.

    `staleness` counts shards, of which each push has `num_shards`.
    """
    # Figure alone draws without a display, which pyplot might ask for.
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, MaxNLocator, StrMethodFormatter

    figure = Figure(figsize=(11, 4), layout="constrained")
    figure.suptitle(title)
    over_time, histogram = figure.subplots(1, 2, width_ratios=(3, 2))

    seconds = [point.seconds for point in points]
    accuracies = [point.accuracy for point in points]
    over_time.plot(seconds, [point.loss for point in points], color="tab:orange", label="training loss (left)")
    # Logarithmic: from the first parameters' loss on, all else would be a flat line.
    over_time.set(xlabel="seconds", ylabel="training loss (logarithmic)", yscale="log")
    over_time.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    over_time.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    over_time.minorticks_off()
    right = over_time.twinx()
    right.plot(seconds, accuracies, color="tab:blue", label="held-out accuracy (right)")
    # A run that was first seen late must not make a small change look large.
    right.set(ylabel="held-out accuracy", ylim=(min(0.5, math.floor(10 * min(accuracies)) / 10), 1))
    right.axhline(
        WANTED_ACCURACY, color="tab:blue", linewidth=1.2, linestyle=":", label=f"accuracy {WANTED_ACCURACY:g}"
    )
    lines = [*over_time.get_lines(), *right.get_lines()]
    # Above the axes, where no curve can be.
    over_time.legend(lines, [str(line.get_label()) for line in lines], loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
    over_time.set_xlim(0, None)

    values = sorted(staleness)
    so_far = np.cumsum([staleness[value] for value in values])
    # The smallest values that together hold nearly all gradients.
    shown = values[: 1 + int(np.searchsorted(so_far, SHOWN_SHARE * staleness.total()))]
    histogram.bar(shown, [staleness[value] for value in shown], color="tab:green", width=0.9)
    last, oldest = max(shown, default=0), max(values, default=0)
    histogram.set_xlim(-0.6, max(last, LEAST_SPAN) + 0.6)
    histogram.xaxis.set_major_locator(MaxNLocator(integer=True))
    largest = f"max {oldest}, not shown" if oldest > last else f"max {oldest}"
    histogram.set(xlabel="staleness (versions)", title=f"Staleness ({largest})")
    histogram.set_ylabel("pushes" if num_shards == 1 else f"pushes, each counted for all {num_shards} shards")

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
