"""Watch workers train on real images through servers of their own; `pyps demo` runs this.

    python examples/demo.py --workers 4 --servers 2 --protocol softsync:n=2

The script starts servers and workers with `pyps.launcher.Job`, reads the servers' figures with `Control` and the
parameters with `Observer`, scores them on images that no worker sees, and draws what happened.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
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

from pyps.cli.control import inherited_token, inherited_token_file
from pyps.cli.dashboard import served
from pyps.config import ConfigError
from pyps.control import Control
from pyps.dashboard.files import write_page
from pyps.launcher import Job, JobError, JobSettings
from pyps.launcher.environment import check_job, spelled
from pyps.units import counted
from pyps.watch.answer import merged, taken
from pyps.watch.history import History
from pyps.watch.watch import Watch
from pyps_client.arrays import Observer
from pyps_client.launch import Launch
from pyps_wire import inspector_pb2 as pb
from pyps_wire.common_pb2 import RUN_STATE_FINISHED, RUN_STATE_READY
from pyps_wire.errors import PypsError

WANTED_ACCURACY = 0.95
# The run is sampled often at its beginning, when it learns most, then at a share of its age.
SAMPLE_SECONDS = 0.05
SAMPLE_SECONDS_MAX = 0.25
SAMPLES = 40
# Samples over which the rate of updates is measured.
RATE_SAMPLES = 20
CALL_SECONDS = 2.0
# How often to print that workers are still loading, and the progress where there is no terminal.
WAITING_SECONDS = 4.0
LINE_SECONDS = 2.0
# Workers report their loss with their heartbeats: often enough for a live table.
HEARTBEAT_SECONDS = 0.5
# Lines of a child's output to show when it fails.
KEPT_LINES = 15
# Those of examples/digits.py, which has settings for each.
OPTIMIZERS = ("adagrad", "sgd", "momentum", "nesterov", "rmsprop", "adam", "adamw")
WORKER = Path(__file__).with_name("digits.py")
NEEDED = {"matplotlib": ".[demo]", "sklearn": ".[demo]", "torch": "./client[torch]"}
# As in examples/digits.py.
HELD_OUT = 360
SPLIT_SEED = 42
# The share of gradients in the histogram: a few stragglers would make it all tail.
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
    picture: Annotated[
        Path, typer.Option(help="Where to save the picture; the page goes beside it, with the ending .html.")
    ] = Path("pyps-demo.png"),
    dashboard: Annotated[
        bool, typer.Option("--dashboard", help="Show the page while it trains, at an address that is printed.")
    ] = False,
) -> None:
    """Watch workers train a small network on real images through servers on this machine.

    By default async with Adagrad on the servers, each gradient's step divided by its staleness. Ends with
    the accuracy on images that no worker saw, a table of what staleness cost, a picture, and the page of
    `pyps dashboard` on this run, in one file.
    """
    if optimizer not in OPTIMIZERS:
        raise ConfigError(
            f"--optimizer is {optimizer!r}, but the demo takes one of {', '.join(OPTIMIZERS)}, "
            "with settings that suit its model"
        )
    settings = {
        "protocol": protocol,
        "staleness": staleness,
        "warmup": warmup,
        "heartbeat_seconds": str(HEARTBEAT_SECONDS),
        "expected_workers": str(workers),
    }
    resolved = check_job(settings, num_servers=servers, num_workers=workers)
    behaviour = resolved.behaviour
    if behaviour.aggregation.coordinated:
        raise ConfigError(
            f"--protocol is {protocol!r}, but the demo's workers push gradients, which sandblaster refuses: "
            "`pyps sandblaster examples/sandblaster_digits.py` shows that one"
        )
    console = Console()
    for module, requirement in (NEEDED | ({"aiohttp": ".[dashboard]"} if dashboard else {})).items():
        if importlib.util.find_spec(module) is None:
            remedy = f"pip install '{requirement}' in a clone of pyps."
            console.print(f"pyps: the demo needs {module}: {remedy}", markup=False)
            raise typer.Exit(1)
    job = JobSettings(
        command=(sys.executable, str(WORKER), "--epochs", str(epochs), "--optimizer", optimizer, "--anneal"),
        num_servers=servers,
        num_workers=workers,
        server_flags=spelled(settings),
        config=resolved,
    )
    mode = f"{protocol}{f' after {warmup}' if warmup else ''}, staleness {behaviour.staleness.text}, {optimizer}"
    raise typer.Exit(Demo(job, mode=mode, console=console, picture=picture, dashboard=dashboard).run())


class Point(NamedTuple):
    """The run at one moment, as the picture shows it."""

    seconds: float
    updates: int
    loss: float
    accuracy: float


class Demo:
    """One demonstration, from the start of its servers to the picture; `mode` describes it in a few words."""

    def __init__(self, settings: JobSettings, *, mode: str, console: Console, picture: Path, dashboard: bool) -> None:
        self._mode = mode
        self._dashboard = dashboard
        self._console = console
        self._picture = picture
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._line_due = 0.0
        self._lines: dict[str, deque[str]] = {}
        self._job = Job(settings, on_line=self._keep_line, announce=self._say)
        self._images = Images()
        self._controls: list[Control] = []
        self._observer: Observer | None = None
        # What the page shows, from the servers' start on.
        self._history = History()
        # When the servers first had parameters.
        self._began_at: float | None = None
        self._points: list[Point] = []
        # The servers' last answers since they have parameters.
        self._newest: Answers | None = None

    def run(self) -> int:
        """Run to the end and return the exit status."""
        settings = self._job.settings
        with self._job.handle_signals(), self._job, contextlib.ExitStack() as connections:
            servers, workers = counted(settings.num_servers, "server"), counted(settings.num_workers, "worker")
            self._say(f"Starting {servers} and {workers}.")
            try:
                self._job.start()
            except JobError as error:
                return self._fail(str(error))
            for server in self._job.addresses:
                control = Control(server.control, token=inherited_token(), timeout_seconds=CALL_SECONDS)
                self._controls.append(connections.enter_context(control))
            self._say(
                f"{workers} on {servers}: {self._mode}.\n"
                f"Look inside: pyps status --servers {','.join(one.control for one in self._job.addresses)}\n"
                "The workers load torch and the images."
            )
            self._keep_history(connections)
            self._watch(connections)
            return self._conclude()

    def _keep_history(self, connections: contextlib.ExitStack) -> None:
        """Keep what the servers say from now on, and show it as a page if that is wanted."""
        places, token_file = [server.control for server in self._job.addresses], inherited_token_file()
        watch = Watch(places, token_file)
        self._history = watch.history
        watch.start()
        connections.callback(watch.close)
        if self._dashboard:
            page, words = served(self._history, places, token_file)
            connections.enter_context(page)
            self._say(words)

    def _watch(self, connections: contextlib.ExitStack) -> None:
        started, printed, finished = time.monotonic(), 0, 0
        with self._live or contextlib.nullcontext():
            while not self._job.done and finished < self._job.settings.num_workers:
                seconds = time.monotonic() - (self._began_at or time.monotonic())
                self._job.wait(min(max(seconds / SAMPLES, SAMPLE_SECONDS), SAMPLE_SECONDS_MAX))
                with contextlib.suppress(PypsError):
                    finished = self._sample(connections)
                waited = time.monotonic() - started
                if self._began_at is None and waited // WAITING_SECONDS > printed:
                    printed = int(waited // WAITING_SECONDS)
                    self._say(f"{waited:.0f} s so far: waiting for the first worker, which is still loading them.")
        if not self._job.done:
            # A Python that has loaded torch takes seconds to end.
            self._say("The training is done; the workers' processes end.")
        while not self._job.done:
            self._job.wait(SAMPLE_SECONDS_MAX)

    def _sample(self, connections: contextlib.ExitStack) -> int:
        """Read, note and show the run's progress; return how many workers have finished."""
        statuses = self._call("GetStatus", pb.GetStatusRequest())
        answers = Answers(statuses, by_worker(self._call("ListWorkers", pb.ListWorkersRequest())))
        if all(status.state in (RUN_STATE_READY, RUN_STATE_FINISHED) for status in statuses):
            if self._observer is None:
                data = [server.data for server in self._job.addresses]
                self._observer = connections.enter_context(Observer(launch=Launch(data, run_id=self._job.run_id)))
            self._began_at = self._began_at or time.monotonic()
            loss, accuracy = self._images.score(self._observer.snapshot())
            self._points.append(Point(time.monotonic() - self._began_at, answers.updates, loss, accuracy))
            self._newest = answers
            self._history.add_row({"t": time.time(), "version": answers.updates, "score": {"accuracy": accuracy}})
            self._show(answers)
        return sum(known[0].state == "finished" for known in answers.workers.values())

    def _call(self, method: str, request: Any) -> list[Any]:
        return [control.call(method, request) for control in self._controls]

    def _show(self, answers: Answers) -> None:
        """Show a live table on a terminal, a line now and then elsewhere."""
        newest, earlier = self._points[-1], self._points[-RATE_SAMPLES:][0]
        seconds = newest.seconds - earlier.seconds
        rate = (newest.updates - earlier.updates) / seconds if seconds else 0.0
        # It has to fit 80 columns.
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
        if self._newest is None:
            return self._fail("The servers never had parameters.")
        self._console.print(final_table(self._newest))
        last = self._points[-1]
        made = f"{last.updates} updates by {counted(len(self._newest.workers), 'worker')}"
        staleness: Counter[int] = Counter()
        for histogram in self._call("GetStaleness", pb.GetStalenessRequest()):
            staleness.update({bucket.staleness: bucket.count for bucket in histogram.buckets})
        title = f"{self._mode}: {made}, accuracy {last.accuracy:.3f}"
        draw(self._picture, self._points, staleness, num_shards=self._newest.num_shards, title=title)
        page = self._picture.with_suffix(".html")
        write_page(page, self._history.to_json())
        self._say(f"Picture: {self._picture.resolve()}\nThe run as a page: {page.resolve()}")
        verdict = f"Held-out accuracy {last.accuracy:.3f} after {last.updates} updates in {last.seconds:.1f} s"
        if last.accuracy < WANTED_ACCURACY:
            return self._fail(f"{verdict}, below the {WANTED_ACCURACY} that this training should reach.")
        self._say(f"{verdict}.")
        return 0

    def _keep_line(self, name: str, line: str) -> None:
        self._lines.setdefault(name, deque(maxlen=KEPT_LINES)).append(line)

    def _say(self, text: str) -> None:
        """Print a line above the live table."""
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)

    def _fail(self, sentence: str) -> int:
        """Print the last lines of failed children and the reason; return the exit status."""
        for child in self._job.servers + self._job.workers:
            if child.returncode:
                for line in self._lines.get(child.name, ()):
                    self._say(f"{child.name} | {line}")
        self._say(f"pyps: {sentence}")
        return 1


@dataclass(frozen=True)
class Answers:
    """The answers of all servers at one moment, about themselves and about each worker by name."""

    statuses: Sequence[pb.Status]
    workers: Mapping[str, Sequence[pb.WorkerInfo]]

    @property
    def updates(self) -> int:
        """Return the run's updates, which is the largest version of a shard."""
        return max(status.version_max for status in self.statuses)

    @property
    def num_shards(self) -> int:
        """Return the number of shards on all servers."""
        return sum(status.num_shards for status in self.statuses)

    def pushes(self, known: Sequence[pb.WorkerInfo]) -> float:
        """Return the number of pushes of a worker. A push has a part for every shard."""
        return taken(merged([one.tally for one in known])) / self.num_shards if self.num_shards else 0.0


def by_worker(listings: Sequence[pb.ListWorkersReply]) -> dict[str, list[pb.WorkerInfo]]:
    """Return each server's information about a worker, by name, sorted."""
    found: dict[str, list[pb.WorkerInfo]] = {}
    for worker in sorted((one for listing in listings for one in listing.workers), key=lambda one: one.worker_id):
        found.setdefault(worker.worker_id, []).append(worker)
    return found


def live_table(answers: Answers) -> Table:
    """Return the table shown during training."""
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
    """Return the table of pushes and of the step size that staleness cost."""
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
    """The images that workers train on, and the 360 held out."""

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        order = np.random.RandomState(SPLIT_SEED).permutation(len(labels))
        self._pixels: Array = (images[order] / 16).astype(np.float32)
        self._labels = labels[order]

    def score(self, parameters: Mapping[str, Array]) -> tuple[float, float]:
        """Return the mean cross-entropy over all training images and the accuracy on the held-out ones."""
        hidden = np.maximum(self._pixels @ parameters["0.weight"].T + parameters["0.bias"], 0)
        scores = hidden @ parameters["2.weight"].T + parameters["2.bias"]
        accuracy = (scores[:HELD_OUT].argmax(axis=1) == self._labels[:HELD_OUT]).mean()
        scores -= scores.max(axis=1, keepdims=True)
        losses = np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(len(scores)), self._labels]
        return float(losses[HELD_OUT:].mean()), float(accuracy)


def draw(path: Path, points: Sequence[Point], staleness: Counter[int], *, num_shards: int, title: str) -> None:
    """Draw loss and accuracy over time and the gradients' staleness, which is counted per shard, into a file."""
    # Figure alone draws without a display, which pyplot might ask for.
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, MaxNLocator, StrMethodFormatter

    figure = Figure(figsize=(11, 4), layout="constrained")
    figure.suptitle(title)
    over_time, histogram = figure.subplots(1, 2, width_ratios=(3, 2))

    seconds = [point.seconds for point in points]
    accuracies = [point.accuracy for point in points]
    over_time.plot(seconds, [point.loss for point in points], color="tab:orange", label="training loss (left)")
    # On a linear axis the first loss would flatten the rest.
    over_time.set(xlabel="seconds", ylabel="training loss (logarithmic)", yscale="log")
    over_time.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    over_time.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    over_time.minorticks_off()
    right = over_time.twinx()
    right.plot(seconds, accuracies, color="tab:blue", label="held-out accuracy (right)")
    # A small change must not look large where the first sample was late.
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
    shown = values[: 1 + int(np.searchsorted(so_far, SHOWN_SHARE * staleness.total()))]
    histogram.bar(shown, [staleness[value] for value in shown], color="tab:green", width=0.9)
    last, oldest = max(shown, default=0), max(values, default=0)
    histogram.set_xlim(-0.6, max(last, LEAST_SPAN) + 0.6)
    histogram.xaxis.set_major_locator(MaxNLocator(integer=True))
    largest = f"up to {oldest}; above {last} not shown" if oldest > last else f"up to {oldest}"
    histogram.set(xlabel="staleness (versions)", title=f"Staleness ({largest})")
    histogram.set_ylabel("pushes" if num_shards == 1 else "pushes of shards")

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    try:
        typer.run(demo)
    except PypsError as error:
        sys.exit(f"demo.py: {error}")
