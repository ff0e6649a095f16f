"""The pictures of `pyps top`: headline, figures, the stream of staleness, and the tabs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from pyps.cli import status
from pyps.cli.status import harmless, work_tables
from pyps.cli.top.history import BANDS, Answer, History, Point
from pyps.control import not_named
from pyps.units import counted, in_bytes, in_seconds
from pyps.watch import answer as answer_of

# From fresh to stale.
COLOURS = ("#3fb950", "#8ac926", "#d4c21f", "#f2a20c", "#f0701d", "#e5383b", "#c9184a", "#9d4edd")
COLUMNS = ("worker", "state", "steps", "steps/s", "loss", "staleness", "step lost", "waited", "waits for", "silent")
_WORDS = ("worker", "state", "waits for")
_STATES = {"alive": "green", "finished": "dim", "expired": "bold red", "failed": "bold red"}
_BARS = " ▁▂▃▄▅▆▇█"
ROWS_MAX = 200
# Raised while drawing impossible numbers, or enumerations of a newer server.
ODD = (ArithmeticError, LookupError, OSError, ValueError)


def drawable(address: str, answer: Answer | str) -> Answer | str:
    """Return the answer, or an error where it cannot be drawn."""
    if isinstance(answer, str):
        return answer
    alone = History([address])
    try:
        for _ in range(2):
            # Twice, for rates.
            alone.take(address, answer)
            alone.tick()
        headline(alone, paused=False)
        workers(alone, sorted_by=COLUMNS[0], reverse=False)
        for picture in (figures, servers, waits, portions, events):
            picture(alone)
    except ODD as error:
        return f"the answer of {address} cannot be shown: {error}"
    return answer


def headline(history: History, *, paused: bool) -> Text:
    """Return a line on the run: name, state, protocol, rate, workers."""
    line = Text()
    for answer in history.answers[:1]:
        facts = status.facts(answer.status)
        alive = max(each.status.workers_alive for each in history.answers)
        rate = facts["learning rate"] and f"rate {facts['learning rate']}"
        words = (answer.status.run_id or "no run yet", facts["state"], facts["in force"], rate, f"{alive} alive")
        line.append_text(harmless("  ".join(str(each) for each in words if each)))
    if silent := history.silent:
        line.append(f"  {len(silent)} of {len(history.servers)} servers do not answer", "bold red")
    return line.append("  paused" if paused else "", "bold yellow")


def figures(history: History) -> Text:
    """Return lines on throughput with its trend, versions, and the cost of staleness."""
    points: Sequence[Point] = history.points or [Point(0, 0, 0, 0, 0, {})]
    last = points[-1]
    lines = [
        f"{name + '/s':<11}{getattr(last, name):>9,.1f} {trend([getattr(each, name) for each in points], 18)}"
        for name in ("steps", "updates", "examples")
    ]
    lines.append(f"in, out    {in_bytes(round(last.bytes_in))}/s, {in_bytes(round(last.bytes_out))}/s")
    if statuses := [answer.status for answer in history.answers]:
        tally = answer_of.merged([each.tally for each in statuses])
        low, high = min(each.version_min for each in statuses), max(each.version_max for each in statuses)
        lines.append(f"version    {low:,}" + (f" to {high:,}" if high > low else ""))
        lines.append(f"staleness  mean {tally.staleness_mean:.2f}, max {tally.staleness_max}")
        lines.append(f"step lost  {tally.step_lost:.1%} to {statuses[0].staleness}")
    return harmless_lines(lines)


def stream(points: Sequence[Point], *, width: int, height: int) -> Text:
    """Return the staleness of gradients over time: a column for each interval, filled from fresh to stale."""
    columns = [_levels(point, 2 * (height - 1)) for point in list(points)[-width:]]
    picture = Text(no_wrap=True)
    for row in range(height - 1, 0, -1):
        picture.append(" " * (width - len(columns)))
        for levels in columns:
            low, high = levels[2 * row - 2], levels[2 * row - 1]
            # A cell has two levels: its foreground is the upper half.
            picture.append("▀" if high else " ", Style(color=high, bgcolor=low))
        picture.append("\n")
    newest = next((point.bands for point in reversed(points) if point.bands), {})
    total = sum(newest.values())
    picture.append("staleness " if width > 60 else "")
    for band, name in enumerate(BANDS):
        if newest.get(band, 0) >= 0.005 * max(total, 1):
            picture.append("■", COLOURS[band]).append(f" {name}: {newest[band] / total:.0%} ")
    return picture


def workers(history: History, *, sorted_by: str, reverse: bool) -> RenderableType:
    """Return a table of the first ROWS_MAX workers; numbers are sorted from the largest on."""
    falls = (sorted_by not in _WORDS) is not reverse
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in COLUMNS:
        mark = (" ▼" if falls else " ▲") if title == sorted_by else ""
        table.add_column(title + mark, no_wrap=True, justify="left" if title in _WORDS else "right")
    rows = sorted(_rows(history), key=lambda row: row[COLUMNS.index(sorted_by)][0], reverse=falls)
    for row in rows[:ROWS_MAX]:
        shown = [harmless(words) for _, words in row]
        shown[1].stylize(_STATES.get(shown[1].plain, ""))
        table.add_row(*shown)
    hidden = len(rows) - ROWS_MAX
    known = answer_of.workers_of(history.answers).values()
    codecs = Counter(words for infos in known if (words := answer_of.codecs_of(infos[0])))
    below = [f"{hidden:,} more: s and S say which come first"] if hidden > 0 else []
    below += [f"codecs up, down: {words} ({counted(count, 'worker')})" for words, count in sorted(codecs.items())]
    return Group(table, harmless_lines(below)) if below else table


def _rows(history: History) -> Iterable[list[tuple[Any, str]]]:
    """Yield for each worker the sort key and the text of every column."""
    for name, known in answer_of.workers_of(history.answers).items():
        info, pace = known[0], history.pace(name)
        tally = answer_of.merged([each.tally for each in known])
        loss = info.scalars.get("loss")
        others = ", ".join(answer_of.waits_for(known))
        yield [
            (name, name),
            (info.state, info.state),
            (info.clock, f"{info.clock:,}"),
            (pace, f"{pace:.1f}"),
            (float("-inf"), "") if loss is None else (loss, f"{loss:.4g} {trend(history.losses[name], 10)}"),
            (tally.staleness_mean, f"{tally.staleness_mean:.2f}, max {tally.staleness_max}"),
            (tally.step_lost, f"{tally.step_lost:.1%}"),
            (tally.blocked_seconds, in_seconds(tally.blocked_seconds)),
            (others, others),
            (info.silent_seconds, in_seconds(info.silent_seconds)),
        ]


def servers(history: History) -> RenderableType:
    """Return the servers that do not answer, and memory and status of the others."""
    now = time.monotonic()
    lost = [f"{each.address}: no answer for {in_seconds(now - each.silent_since)}" for each in history.silent]
    memory = [
        f"{answer.address}: {in_bytes(of.resident_bytes)} in all, {in_bytes(of.parameters_bytes)} parameters, "
        f"{in_bytes(of.slots_bytes)} slots, {in_bytes(of.pending_bytes)} waiting, {in_bytes(of.in_flight_bytes)} in "
        f"flight, saves {answer.status.version_min - answer.status.durable_version:,} behind"
        for answer in history.answers
        for of in (answer.memory,)
    ]
    tables = [status.servers_table(history.answers)] if history.answers else []
    return Group(harmless_lines(lost, "bold red"), harmless_lines(memory), *tables)


def waits(history: History) -> RenderableType:
    """Return who waits for whom and why, and the servers' warnings."""
    waiting = {name: answer_of.waits_for(known) for name, known in answer_of.workers_of(history.answers).items()}
    lines = [f"{name} waits for {', '.join(others)}" for name, others in waiting.items() if others]
    lines += status.lines([replace(answer, events=()) for answer in history.answers])
    lines += [f"{server.address} does not answer: {server.error}" for server in history.silent]
    if not history.silent and (hint := not_named([answer.status for answer in history.answers])):
        lines.append(hint)
    return harmless_lines(lines or ["no worker waits"])


def portions(history: History) -> RenderableType:
    """Return the progress with the data set, where workers take it in portions."""
    tables = [table for answer in history.answers for table in work_tables(answer.work)]
    return Group(*tables) if tables else Text("no worker takes its data in portions")


def events(history: History) -> Text:
    """Return the events, newest first."""
    newest = reversed(history.events)
    return harmless_lines(f"{datetime.fromtimestamp(at):%H:%M:%S}  {where}  {words}" for at, where, words in newest)


def trend(values: Iterable[float], width: int) -> str:
    """Return the last values as bars."""
    last = list(values)[-width:]
    largest = max(last, default=0.0)
    shares = [value / largest if 0 < value <= largest < float("inf") else 0.0 for value in last]
    return "".join(_BARS[round(8 * share)] for share in shares)


def harmless_lines(lines: Iterable[str], style: str = "") -> Text:
    """Return lines without control characters and markup."""
    return Text("\n", style).join(harmless(line) for line in lines)


def _levels(point: Point, height: int) -> list[str | None]:
    """Return the colour of each level of a column, the lowest first; None without gradients."""
    total, seen = sum(point.bands.values()), 0
    levels: list[str | None] = [] if total else [None] * height
    for band in sorted(point.bands):
        seen += point.bands[band]
        levels += [COLOURS[band]] * (round(height * seen / total) - len(levels))
    return levels
