"""`pyps top`: a run's charts in the terminal."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.color import Color
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pyps.cli.control import ObserverTokenFile, Servers, fail
from pyps.cli.status import harmless
from pyps.units import in_bytes, in_seconds
from pyps.watch.watch import INTERVAL_SECONDS, Watch
from pyps_client.credentials import read_token
from pyps_client.launch import parse_servers
from pyps_wire.contract import CONTROL_PORT

# Of lines, the slow worker's first; of more workers nothing is drawn.
COLOURS = ("#f2a20c", "#3fb0f0", "#3fb950", "#c76bdb", "#e5383b", "#9aa0a6")
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
    watch, console, number = Watch(places, token_file), Console(), 0
    watch.start()
    with Live(console=console, screen=True, auto_refresh=False) as live, _keys():
        # A KeyboardInterrupt would be lost in code that C calls back.
        ended = False

        def end(*_: object) -> None:
            nonlocal ended
            ended = True

        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, end)
        while not ended:
            doc = watch.history.to_json(number)
            number, size, until = doc["number"], console.size, time.monotonic() + INTERVAL_SECONDS
            live.update(picture(doc, watch.history.rows, *size), refresh=True)
            while not ended and time.monotonic() < until and console.size == size:
                if select.select([sys.stdin], [], [], 0.1)[0]:
                    pressed = os.read(sys.stdin.fileno(), 64)
                    ended = b"q" in pressed or not pressed
    watch.close()


def picture(doc: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], width: int, height: int) -> RenderableType:
    """Return lines that fill so much room: what is in force, what holds the run back, tables, and four charts."""
    rate = "" if doc["rate"] is None else f"rate {doc['rate']:.4g}"
    facts = [doc["run"] or "no run yet", doc["state"], doc["protocol"], rate, f"version {doc['version']:,}"]
    head, sentence = harmless("  ".join(filter(None, facts))), Text(f"{doc['sentence']}.", "bold yellow")
    head.truncate(width, overflow="ellipsis")
    sentence.truncate(2 * width - 20, overflow="ellipsis")
    names = sorted((worker["name"] for worker in doc["workers"]), key=lambda name: name != doc["slow"])
    losses = {name: [row.get("loss", {}).get(name) for row in rows] for name in names}
    speeds, staleness, waited = (
        {label: [row.get(name) for row in rows] for name, label in lines.items()}
        for lines in ({"steps": "steps/s", "updates": "updates/s"}, {"staleness": "mean"}, {"waited": "of all time"})
    )
    tables = [harmless(_table(table)) for table in doc["tables"][: height // 8]]
    for line in tables:
        line.truncate(width, overflow="ellipsis")
    room = max(8, height - 2 - len(tables) - (len(sentence) > width))
    times, size = [row["t"] - rows[-1]["t"] for row in rows], (width // 2, room // 2)
    charts = Table.grid(padding=0)
    charts.add_row(chart("loss", times, losses, *size), chart("speed", times, speeds, *size))
    charts.add_row(chart("staleness", times, staleness, *size), chart("waited", times, waited, *size))
    return Group(head, sentence, *tables, charts)


def _table(table: Mapping[str, Any]) -> str:
    return (
        f"table {table['name']}: {table['rows']:,} rows of {table['admitted']:,} admitted, {in_bytes(table['bytes'])}, "
        f"{table['hit_rate']:.1%} hits, {table['expired']:,} expired, {table['evicted']:,} evicted"
    )


def chart(
    title: str, times: Sequence[float], lines: Mapping[str, Sequence[float | None]], width: int, height: int
) -> Text:
    """Return lines over time as large as that, below what each is."""
    import plotext

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.limit_size(False, False)
    plotext.plotsize(width, height - 1)
    legend, most = Text(f"{title} "), 0.0
    for (name, values), colour in zip(lines.items(), COLOURS, strict=False):
        legend.append("━", colour).append_text(harmless(f" {name[:20]} "))
        known = [(at, value) for at, value in zip(times, values, strict=True) if value is not None]
        drawn = [each for each in known if abs(each[1]) < DRAWN_MOST]
        if drawn:
            most = max(most, *(value for _, value in drawn))
            plotext.plot(*zip(*drawn, strict=True), marker="braille", color=tuple(Color.parse(colour).get_truecolor()))
    if title != "loss":
        # Of a share that stays 0 plotext would show what is below.
        plotext.ylim(0, most or 1)
    legend.truncate(width - 1)
    span = -min(times, default=0.0)
    plotext.xticks([-span, -span / 2, 0], [in_seconds(span), f"{in_seconds(span / 2)} ago", "now"])
    return legend.append("\n").append_text(Text.from_ansi(plotext.build().rstrip()))


@contextmanager
def _keys() -> Iterator[None]:
    """Let keys come at once, without Enter."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
