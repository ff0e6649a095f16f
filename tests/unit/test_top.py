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


def test_what_is_missing_or_makes_no_sense_is_one_sentence(monkeypatch):
    assert "'a b' is malformed" in shell("top", "--servers", "a b", status=2)
    assert "pyps top needs a terminal: `pyps status` writes to a pipe" in shell("top", status=2)
    monkeypatch.setitem(sys.modules, "plotext", None)
    assert "which is not installed: pip install '.[top]' in a clone" in shell("top", status=2)
