"""What trials say: a table for people, files for programs, and a picture."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryFile
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from pyps.cli.laboratory.settings import Settings
from pyps.cli.laboratory.trial import Outcome, Point, Trial
from pyps_wire.errors import InvalidArgument

Rows = Sequence[tuple[Trial, Outcome]]


def combinations(rows: Rows) -> list[tuple[Trial, list[Outcome]]]:
    """Return the first trial of each combination, and the outcomes of its seeds."""
    groups = [list(of) for _, of in groupby(rows, key=lambda row: (row[0].protocol, row[0].staleness, row[0].rate))]
    return [(group[0][0], [outcome for _, outcome in group]) for group in groups]


def table(rows: Rows, settings: Settings, *, trained: bool) -> Table:
    """Return a row for each combination, with means over its seeds and the figure's deviation."""
    made = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("protocol", "policy"):
        made.add_column(name, min_width=8, overflow="fold")
    cells = [_cells(outcomes, settings, trained=trained) for _, outcomes in combinations(rows)]
    for name in ["rate"] * trained + list(cells[0]):
        made.add_column(name, justify="right", no_wrap=True)
    for (trial, outcomes), row in zip(combinations(rows), cells, strict=True):
        notes = [str(note) for outcome in outcomes if (note := outcome.measured["note"])]
        note = f"\n{len(notes)} of {len(outcomes)} {notes[0]}" if notes else ""
        made.add_row(trial.protocol, trial.staleness + note, *[f"{trial.rate:g}"] * trained, *row.values())
    return made


def _cells(outcomes: Sequence[Outcome], settings: Settings, *, trained: bool) -> dict[str, str]:
    """Return the columns of a combination's row."""
    names = [name for name in outcomes[0].measured if name != "note"]
    numbers = {name: [float(outcome.measured[name]) for outcome in outcomes] for name in names}
    means = {name: fmean(column) for name, column in numbers.items()}
    cells = {"figure": _figure(numbers["figure"])} if trained else {}
    if trained and settings.target is not None:
        cells["s to\ntarget"] = _reached(numbers["target_seconds"])
    return {
        **cells,
        "updates\n/s": _number(means["updates_per_second"]),
        "examples\n/s": _number(means["examples_per_second"]),
        "stale-\nness": f"{means['mean_staleness']:.2f}",
        "wait-\ning": "–" if math.isnan(means["waiting"]) else f"{means['waiting']:.0%}",
        "bytes/\nexample": _number(means["bytes_per_example"]),
    }


def _figure(values: Sequence[float]) -> str:
    if not all(map(math.isfinite, values)):
        return "–"
    return f"{fmean(values):.3g}" + (f" ±{stdev(values):.2g}" if len(values) > 1 else "")


def _reached(values: Sequence[float]) -> str:
    there = [value for value in values if math.isfinite(value)]
    if len(there) == len(values):
        return _number(fmean(there))
    return f"{len(there)} of {len(values)}\nby {_number(max(there))}" if there else "never"


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Make a folder and see that it can be written; InvalidArgument for what the system refuses now or in the block."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
        yield
    except OSError as error:
        raise InvalidArgument(f"--out {folder} cannot be written: {error.strerror or error}") from None


def write(folder: Path, rows: Rows, settings: Settings) -> list[Path]:
    """Write trials.csv, curves.csv, simulation.json and, with matplotlib, simulation.png; return their paths."""
    trials = [_row(trial, outcome.measured) for trial, outcome in rows]
    points = [_row(trial, point._asdict()) for trial, outcome in rows for point in outcome.points]
    text = json.dumps({"settings": asdict(settings), "trials": trials}, indent=1) + "\n"
    (folder / "simulation.json").write_text(text, encoding="utf-8")
    written = [folder / "simulation.json", _write_csv(folder / "trials.csv", trials)]
    if points:
        written.append(_write_csv(folder / "curves.csv", points))
        lines = [
            (f"{trial.protocol}, {trial.staleness}, {trial.rate:g}", [outcome.points for outcome in of])
            for trial, of in combinations(rows)
        ]
        written += [folder / "simulation.png"] * draw_curves(folder / "simulation.png", lines)
    return written


def _row(trial: Trial, measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row as files have it: six digits, and an empty text for what is no number."""
    rounded = {
        name: value if not isinstance(value, float) else float(f"{value:.6g}") if math.isfinite(value) else ""
        for name, value in measured.items()
    }
    return {**asdict(trial), **rounded}


def _write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def draw_curves(
    path: Path, lines: Sequence[tuple[str, Sequence[Sequence[Point]]]], *, target: float | None = None
) -> bool:
    """Draw a line for each name, the mean of its curves as far as all have come; False without matplotlib."""
    try:
        # Figure alone draws without a display, which pyplot might ask for.
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(11, max(4.2, 0.5 + 0.2 * len(lines))), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for number, (name, curves) in enumerate(lines):
        places = list(zip(*curves, strict=False))
        values = [fmean(point.figure for point in place) for place in places]
        # Ten colours, then again in dashes.
        style = ("-", "--", ":", "-.")[number // 10 % 4]
        for axis, of in zip(axes, ("seconds", "examples"), strict=True):
            along = [fmean(getattr(point, of) for point in place) for place in places]
            axis.plot(along, values, style, lw=1.4, label=name)
    for axis, label in zip(axes, ("virtual seconds", "examples"), strict=True):
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
        if target is not None:
            axis.axhline(target, color="grey", lw=0.8)
    # Where something diverges, what does not is to be seen all the same.
    figures = [[point.figure for point in curve if math.isfinite(point.figure)] for _, of in lines for curve in of]
    if all(figures):
        first, least = max(each[0] for each in figures), min(map(min, figures))
        axes[0].set_ylim(top=min(axes[0].get_ylim()[1], 2 * first - least + 1e-9))
    axes[0].set_ylabel("figure (lower is better)")
    axes[1].legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.02, 1.0))
    # Without the version, so that equal trials give equal bytes.
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return True
