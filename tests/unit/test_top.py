"""What `pyps top` draws of a history: as large as the terminal, and harmless."""

import math
import re
import sys

import pytest
from rich.console import Console

from pyps.cli import top
from pyps.watch.answer import Answer
from pyps.watch.history import History
from pyps_wire import inspector_pb2 as pb
from support import shell


@pytest.mark.parametrize(
    ("width", "height", "workers", "loss", "name"),
    [
        (80, 24, 4, 0.5, "worker-"),
        (133, 43, 200, -1.0, "worker-"),
        (250, 70, 0, 0.0, "worker-"),
        (60, 16, 4, math.nan, "\x1b]0;mine\x07[red]\u202e"),
        (120, 30, 4, 1e300, "\x1b]0;mine\x07[red]\u202e"),
    ],
)
def test_it_fills_the_terminal_and_no_more(width, height, workers, loss, name):
    history = History(["a"], clock=lambda: 1000.0 + len(history.rows))
    infos = [pb.WorkerInfo(worker_id=f"{name}{n}", state="alive", scalars={"loss": loss}) for n in range(workers)]
    for uptime in (1.0, 2.0):
        status = pb.Status(state=3, run_id=name, protocol="async", uptime_seconds=uptime)
        history.take("a", Answer("a", status, infos))
        history.tick()
    with (console := Console(width=width, height=height, force_terminal=True)).capture() as shown:
        console.print(top.picture(history.to_json(), history.rows, width, height), end="")
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown.get())
    lines = text.rstrip("\n").split("\n")
    assert height - 2 <= len(lines) <= height and width - 1 <= max(map(len, lines)) <= width
    assert all(each.isprintable() for each in lines) and name.translate({27: "?", 7: "?", 0x202E: "?"}) in lines[0]
    assert lines[2].startswith("loss") and "speed ━ steps/s ━ updates/s" in lines[2]
    assert any(re.match("staleness ━ mean +waited ━", line) for line in lines)
    assert any("1.0 s" in line and "now" in line for line in lines)


def test_its_axes_are_those_of_the_figures():
    history = History(["a"], clock=lambda: 1000.0 + len(history.rows))
    for second in range(20):
        history.add_row(
            {"t": 1000.0 + second, "version": 3, "loss": {"w": 7.5 - second / 4}, "steps": 40.0, "updates": 20.0}
        )
        history.rows[-1].update(waited=0.25, staleness=1.5)
    history.take(
        "a", Answer("a", pb.Status(state=3, uptime_seconds=1.0), [pb.WorkerInfo(worker_id="w", state="alive")])
    )
    with (console := Console(width=120, height=40)).capture() as shown:
        console.print(top.picture(history.to_json(), history.rows, 120, 40), end="")
    halves = [(line[:60], line[60:]) for line in shown.get().split("\n")]
    numbers = [
        [float(found) for line in halves for found in re.findall(r"^ *(-?\d+\.\d+)┤", line[side])] for side in (0, 1)
    ]
    (loss, staleness), (speed, waited) = ((each[: len(each) // 2], each[len(each) // 2 :]) for each in numbers)
    assert [(min(each), max(each)) for each in (loss, staleness, speed, waited)] == [
        (2.75, 7.5),
        (0, 1.5),
        (0, 40),
        (0, 0.25),
    ]


def test_a_line_a_table_has_the_sums_of_its_shards_and_the_charts_have_what_room_is_left():
    history = History(["a", "b"], clock=lambda: 1000.0 + len(history.rows))
    counts = {"rows": 600, "bytes": 2**20, "admitted": 700, "expired": 90, "evicted": 10, "lookups": 100}
    for address, hits in (("a", 50), ("b", 25)):
        tables = [pb.TableInfo(name=f"table \x1b[{n}", hits=hits, **counts) for n in range(9)]
        history.take(address, Answer(address, pb.Status(state=3, tables=tables)))
    history.tick()
    with (console := Console(width=120, height=32)).capture() as shown:
        console.print(top.picture(history.to_json(), history.rows, 120, 32), end="")
    lines = shown.get().rstrip("\n").split("\n")
    facts = "1,200 rows of 1,400 admitted, 2.0 MiB, 37.5% hits, 180 expired, 20 evicted"
    assert [line.rstrip() for line in lines[2:6]] == [f"table table ?[{n}: {facts}" for n in range(4)]
    assert lines[6].startswith("loss") and 30 <= len(lines) <= 32


def test_what_is_missing_or_makes_no_sense_is_one_sentence(monkeypatch):
    assert "'a b' is malformed" in shell("top", "--servers", "a b", status=2)
    assert "pyps top needs a terminal: `pyps status` writes to a pipe" in shell("top", status=2)
    monkeypatch.setitem(sys.modules, "plotext", None)
    assert "which is not installed: pip install '.[top]' in a clone" in shell("top", status=2)
