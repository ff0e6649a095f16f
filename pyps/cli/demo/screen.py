"""What the demo shows while it runs and at its end."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pyps.cli.demo.progress import Progress

PLAIN_LINE_SECONDS = 2.0


class Screen:
    """A picture that renews itself on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._line_due = 0.0

    def show(self, progress: Progress, *, updates_per_second: float, loss: float, accuracy: float) -> None:
        headline = headline_of(progress, updates_per_second=updates_per_second, loss=loss, accuracy=accuracy)
        if self._live is not None:
            self._live.update(Group(live_table(progress), Text(headline)), refresh=True)
        elif progress.seconds >= self._line_due:
            self._line_due = progress.seconds + PLAIN_LINE_SECONDS
            self._console.print(headline, soft_wrap=True, highlight=False)

    def line(self, text: str) -> None:
        """A line above the picture that stays."""
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)

    def __enter__(self) -> Screen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()


def headline_of(progress: Progress, *, updates_per_second: float, loss: float, accuracy: float) -> str:
    """The run in one line, narrow enough for a terminal of 80 columns."""
    parts = [
        f"{progress.seconds:4.1f} s",
        f"update {progress.updates:4d}",
        f"{updates_per_second:3.0f}/s",
        f"staleness {progress.staleness_mean:.1f} (max {progress.staleness_max})",
        f"loss {loss:.3f}",
        f"accuracy {in_words(accuracy)}",
    ]
    return "  ".join(parts)


def in_words(accuracy: float) -> str:
    """An accuracy as it is written everywhere: of 360 images each is worth 0.003."""
    return f"{accuracy:.3f}"


def live_table(progress: Progress) -> Table:
    """The workers while they train."""
    table = Table(title=f"versions {progress.version_min} to {progress.version_max}", title_justify="left")
    for name in ("worker", "state", "steps", "loss", "staleness mean", "max"):
        table.add_column(name, justify="left" if name in ("worker", "state") else "right")
    for worker in progress.workers:
        table.add_row(
            worker.worker_id,
            worker.state,
            str(worker.steps),
            "" if worker.loss is None else f"{worker.loss:.3f}",
            f"{worker.staleness_mean:.2f}",
            str(worker.staleness_max),
        )
    return table


def final_table(progress: Progress) -> Table:
    """What each worker gave and what staleness took of it."""
    table = Table(title="What staleness cost", title_justify="left")
    table.add_column("worker")
    for name in ("pushes", "mean staleness", "step size lost to staleness"):
        table.add_column(name, justify="right")
    for worker in progress.workers:
        table.add_row(
            worker.worker_id,
            f"{worker.pushes:.0f}",
            f"{worker.staleness_mean:.2f}",
            f"{1 - worker.rate_scale_mean:.0%}",
        )
    table.add_section()
    table.add_row(
        "all",
        f"{sum(worker.pushes for worker in progress.workers):.0f}",
        f"{progress.staleness_mean:.2f}",
        f"{1 - progress.rate_scale_mean:.0%}",
    )
    return table
