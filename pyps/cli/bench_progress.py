"""What `pyps bench` shows while it measures: a bar on a terminal, a line a stage elsewhere."""

from __future__ import annotations

import statistics
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from pyps.cli.rounds import Way

# A bar that is drawn more often would take part in what is measured.
DRAW_SECONDS = 0.5


class BenchProgress:
    """Follows one measurement, stage by stage.

    Draws between rounds only, on the thread that makes them.
    """

    def __init__(self, console: Console, *, num_stages: int, seconds: float) -> None:
        """`seconds`: how long each stage is measured."""
        self._console = console
        self._num_stages = num_stages
        self._seconds = seconds
        self._stage = 0
        self._began = self._drawn = 0.0
        # Of the present stage, in the order made.
        self._timed: list[float] = []
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[made]}"),
            console=console,
            auto_refresh=False,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None

    def begin(self, way: Way, num_parameters: int) -> None:
        """A stage begins."""
        self._stage += 1
        self._began = self._drawn = time.monotonic()
        self._timed = []
        words = f"{self._stage} of {self._num_stages}: {num_parameters:,} parameters, {way.transport}, {way.codec}"
        if not self._console.is_terminal:
            self._console.print(f"{words} ...", highlight=False, soft_wrap=True)
            return
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(words, total=max(self._seconds, 1e-9), made="")
        self._bar.refresh()

    def made(self, seconds: float) -> None:
        """A timed round took so long."""
        self._timed.append(seconds)
        now = time.monotonic()
        if self._task is not None and now - self._drawn >= DRAW_SECONDS:
            self._drawn = now
            median = 1e3 * statistics.median(self._timed)
            words = f"{len(self._timed):,} rounds, p50 {median:,.2f} ms"
            self._bar.update(self._task, completed=min(now - self._began, self._seconds), made=words, refresh=True)

    def __enter__(self) -> BenchProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
