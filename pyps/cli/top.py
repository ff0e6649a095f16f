"""`pyps top`: a run's charts in the terminal."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.color import Color
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.style import Style
from rich.table import Table
from rich.text import Text

from pyps.cli.control import ObserverTokenFile, Servers, fail
from pyps.cli.status import harmless
from pyps.watch.answer import printable
from pyps.watch.watch import INTERVAL_SECONDS, Watch
from pyps_client.credentials import read_token
from pyps_client.launch import parse_servers
from pyps_wire.contract import CONTROL_PORT

# Bands of staleness, from fresh to stale.
BANDS = ("0", "1", "2", "3-4", "5-8", "9-16", "17-32", "33+")
COLOURS = ("#3fb950", "#8ac926", "#d4c21f", "#f2a20c", "#f0701d", "#e5383b", "#c9184a", "#9d4edd")
# Of lines, the slow worker's first.
LINES = ("#f2a20c", "#3fb0f0", "#3fb950", "#c76bdb", "#e5383b", "#9aa0a6")
# Between two ticks.
TICK_SECONDS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 3600, 7200, 14400)
# As wide as a terminal may be.
SECONDS_MAX = 1000
DRAWN_MOST = 1e30


def top(servers: Servers = "127.0.0.1:7611", token_file: ObserverTokenFile = None) -> None:
    """Watch a run's charts in the terminal until q is pressed."""
    places = parse_servers(servers, port=CONTROL_PORT)
    read_token(token_file)
    try:
        import plotext  # noqa: F401
    except ModuleNotFoundError:
        fail("pyps top needs plotext, which is not installed: pip install '.[top]' in a clone of pyps", status=2)
    if not (sys.stdout.isatty() and sys.stdin.isatty()):
        fail("pyps top needs a terminal: `pyps status` writes to a pipe", status=2)
    watch, view, console = Watch(places, token_file), View(), Console()
    watch.start()
    with Live(console=console, screen=True, auto_refresh=False) as live, _keys():
        # A KeyboardInterrupt would be lost in code that C calls back.
        ended = False

        def end(*_: object) -> None:
            nonlocal ended
            ended = True

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, end)
        while not ended:
            view.take(watch.history.to_json(view.number))
            size, until = console.size, time.monotonic() + INTERVAL_SECONDS
            live.update(view.picture(watch.history.rows, *size), refresh=True)
            while not ended and time.monotonic() < until and console.size == size:
                if select.select([sys.stdin], [], [], 0.1)[0]:
                    pressed = os.read(sys.stdin.fileno(), 64)
                    ended = b"q" in pressed or not pressed
    watch.close()


class View:
    """What the terminal shows: the last answer of a history, and gradients by second and band of staleness."""

    def __init__(self) -> None:
        self.number = 0
        self._doc: dict[str, Any] = {}
        self._bands: defaultdict[int, Counter[int]] = defaultdict(Counter)

    def take(self, doc: dict[str, Any]) -> None:
        for number, _, _, ended, staleness, outcome, *_ in doc["steps"]:
            if number > self.number and outcome != "rejected":
                self._bands[int(ended)][band_of(staleness)] += 1
        for second in [second for second in self._bands if second < doc["now"] - SECONDS_MAX]:
            del self._bands[second]
        self._doc, self.number = doc, doc["number"]

    def picture(self, rows: Sequence[Mapping[str, Any]], width: int, height: int) -> RenderableType:
        """Return lines that fill so much room."""
        doc = self._doc
        rate = "" if doc["rate"] is None else f"rate {doc['rate']:.4g}"
        facts = [doc["run"] or "no run yet", doc["state"], doc["protocol"], rate, f"version {doc['version']:,}"]
        head, sentence = harmless("  ".join(filter(None, facts))), Text(f"{doc['sentence']}.", "bold yellow")
        head.truncate(width, overflow="ellipsis")
        sentence.truncate(2 * width - 20, overflow="ellipsis")
        room = max(8, height - 2 - (len(sentence) > width))
        names = sorted((worker["name"] for worker in doc["workers"]), key=lambda name: name != doc["slow"])
        losses = {name: _points([(row["t"], row.get("loss", {}).get(name)) for row in rows]) for name in names}
        speeds = {f"{name}/s": _points([(row["t"], row.get(name)) for row in rows]) for name in ("steps", "updates")}
        charts = Table.grid(padding=0)
        size = (width // 2, room - room // 3)
        charts.add_row(chart("loss", losses, *size), chart("speed", speeds, *size, from_zero=True))
        return Group(head, sentence, charts, self._stream(width, room // 3))

    def _stream(self, width: int, height: int) -> Text:
        """Return the staleness of gradients over time: a column a second, filled from fresh to stale."""
        # A server lists a step later than its worker made it.
        last = int(self._doc["now"]) - 2
        seconds = [self._bands.get(last - ago, Counter[int]()) for ago in reversed(range(width))]
        columns = [_levels(bands, 2 * (height - 1)) for bands in seconds]
        picture = Text(no_wrap=True, end="")
        for row in range(height - 1, 0, -1):
            for levels in columns:
                low, high = levels[2 * row - 2], levels[2 * row - 1]
                # A cell has two levels: its foreground is the upper half.
                picture.append("▀" if high else " ", Style(color=high, bgcolor=low))
            picture.append("\n")
        newest = sum(seconds[-10:], Counter[int]())
        legend = Text("staleness ", no_wrap=True)
        for band, count in sorted(newest.items()):
            legend.append("■", COLOURS[band]).append(f" {BANDS[band]}: {count / newest.total():.0%} ")
        legend.truncate(width)
        return picture.append_text(legend)


Points = tuple[list[float], list[float]]


def chart(title: str, lines: Mapping[str, Points], width: int, height: int, *, from_zero: bool = False) -> Text:
    """Return lines over time as large as that, below what each is."""
    import plotext

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.limit_size(False, False)
    plotext.plotsize(width, height - 1)
    legend, span, top = Text(f"{title} "), 0.0, 0.0
    for (name, (times, values)), colour in zip(lines.items(), LINES, strict=False):
        legend.append("━", colour).append(f" {printable(name)[:20]} ")
        if times:
            plotext.plot(times, values, marker="braille", color=tuple(Color.parse(colour).get_truecolor()))
            span, top = max(span, -times[0]), max(top, *values)
    legend.truncate(width - 1)
    ticks = ticks_of(span)
    plotext.xticks([-float(seconds) for seconds in ticks], list(ticks.values()))
    if from_zero:
        plotext.ylim(0, top or 1)
    return legend.append("\n").append_text(Text.from_ansi(plotext.build().rstrip()))


def ticks_of(span: float) -> dict[int, str]:
    """Return how long ago the ticks of a chart are, in seconds and in words."""
    step = next((each for each in TICK_SECONDS if span < 4 * each), TICK_SECONDS[-1])
    ticks = range(step, int(span) + 1, step)
    return {0: "now"} | {ago: f"{ago // 60} min" if step >= 60 else f"{ago} s" for ago in ticks}


def band_of(staleness: int) -> int:
    return min((staleness - 1).bit_length() + 1, len(BANDS) - 1) if staleness > 0 else 0


def _points(found: Sequence[tuple[float, float | None]]) -> Points:
    """Return times as seconds after the last, and the numbers there that can be drawn."""
    known = [(at - found[-1][0], value) for at, value in found if value is not None and abs(value) < DRAWN_MOST]
    return [at for at, _ in known], [value for _, value in known]


def _levels(bands: Mapping[int, int], height: int) -> list[str | None]:
    """Return the colour of each level of a column, the lowest first; None without gradients."""
    total, seen = sum(bands.values()), 0
    levels: list[str | None] = [] if total else [None] * height
    for band in sorted(bands):
        seen += bands[band]
        levels += [COLOURS[band]] * (round(height * seen / total) - len(levels))
    return levels


@contextmanager
def _keys() -> Iterator[None]:
    """Let keys come at once, without Enter."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
