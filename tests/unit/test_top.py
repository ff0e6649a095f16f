"""What `pyps top` draws of a history: as large as the terminal, harmless, gradients by their staleness."""

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

NOW = 1000.0


def drawn(*, width: int, height: int, name: str = "worker-0", number: float = 0.5, workers: int = 4) -> str:
    history = History(["a"], clock=lambda: NOW)
    status = pb.Status(state=3, run_id=name, protocol="async", staleness="divide", warnings=[name])
    status.learning_rates.add(current=number)
    infos = [
        pb.WorkerInfo(worker_id=f"{name}{index}", state="alive", scalars={"loss": number}, waits_for=[name])
        for index in range(workers)
    ]
    for uptime in (1.0, 2.0):
        status = pb.Status.FromString(status.SerializeToString())
        status.uptime_seconds = uptime
        history.take("a", Answer("a", status, infos))
        history.tick()
    for staleness in (0, 0, 0, 4):
        history.add_step(f"{name}0", NOW - 3.5, NOW - 2.5, staleness=staleness)
    view = top.View()
    view.take(history.to_json())
    with (console := Console(width=width, height=height, force_terminal=True)).capture() as shown:
        console.print(view.picture(history.rows, width, height), end="")
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.get())


@pytest.mark.parametrize(("width", "height"), [(80, 24), (133, 43), (250, 70), (60, 16)])
def test_it_fills_the_terminal_and_no_more(width, height):
    for workers in (0, 4, 200):
        lines = drawn(width=width, height=height, workers=workers).rstrip("\n").split("\n")
        assert height - 2 <= len(lines) <= height and max(map(len, lines)) == width
    assert lines[2].startswith("loss") and "speed ━ steps/s ━ updates/s" in lines[2]
    assert any("now" in line for line in lines)
    assert any(line.startswith("staleness ■ 0: 75% ■ 3-4: 25%") for line in lines)


@pytest.mark.parametrize("number", [0.0, -1.0, 1e300, math.nan])
def test_odd_names_and_numbers_are_drawn_as_they_can_be(number):
    text = drawn(width=120, height=30, name="\x1b]0;mine\x07[red]\u202e", number=number)
    assert "?]0;mine?[red]?" in text and all(each.isprintable() or each == "\n" for each in text)


def test_ticks_are_whole_seconds_or_minutes_ago():
    for span, words in (
        (0.4, ["now"]),
        (3.5, ["now", "1 s", "2 s", "3 s"]),
        (100, ["now", "30 s", "60 s", "90 s"]),
        (150, ["now", "1 min", "2 min"]),
        (14399, ["now", "60 min", "120 min", "180 min"]),
    ):
        assert list(top.ticks_of(span).values()) == words


def test_every_staleness_has_the_band_that_names_it():
    for staleness in range(200):
        low, _, high = top.BANDS[top.band_of(staleness)].replace("33+", "33-999").partition("-")
        assert int(low) <= staleness <= int(high or low)


def test_what_is_missing_or_makes_no_sense_is_one_sentence(monkeypatch):
    assert "'a b' is malformed" in shell("top", "--servers", "a b", status=2)
    assert "pyps top needs a terminal: `pyps status` writes to a pipe" in shell("top", status=2)
    monkeypatch.setitem(sys.modules, "plotext", None)
    assert "which is not installed: pip install '.[top]' in a clone" in shell("top", status=2)
