"""The picture of experiments/sandblaster.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from experiments import sandblaster_balance as balance
from experiments import sandblaster_training as training
from experiments.sandblaster_balance import Makespan
from experiments.sandblaster_traffic import WorkerTraffic
from experiments.sandblaster_training import DOWNPOUR, DOWNPOUR_SGD, SANDBLASTER, SGD, Point, TimeToTarget, label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {SGD: "tab:green", DOWNPOUR_SGD: "tab:orange", DOWNPOUR: "tab:blue", SANDBLASTER: "tab:red"}
MODE_NAMES = {"static": "each its share", "dynamic": "portions", "backup": "portions\nand copies"}
# Sandblaster's loss by passes is the same whatever the number of workers: one is drawn.
WORKERS_DRAWN = (1, training.DOWNPOUR_WORKERS)


def draw(
    path: Path,
    points: Sequence[Point],
    times: Sequence[TimeToTarget],
    makespans: Sequence[Makespan],
    workers: Sequence[WorkerTraffic],
) -> None:
    """Draws the loss by passes, the time to the target, the makespans and the bytes."""
    # Figure alone draws without a display, which pyplot might ask for.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 8), layout="constrained")
    figure.suptitle(f"Sandblaster beside Downpour, digits, in virtual time: mean of {len(training.SEEDS)} seeds")
    (losses, targets), (spans, bytes_axis) = figure.subplots(2, 2)
    _draw_losses(losses, points, times)
    _draw_times(targets, times)
    _draw_makespans(spans, makespans)
    _draw_bytes(bytes_axis, workers)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _draw_losses(axis: Axes, points: Iterable[Point], times: Sequence[TimeToTarget]) -> None:
    drawn = {(time.method, time.workers, time.rate) for time in times if time.workers in WORKERS_DRAWN}
    curves: dict[tuple[str, int, float], dict[float, list[Point]]] = {}
    for point in points:
        key = (point.method, point.workers, point.rate)
        if key in drawn:
            # Sandblaster's seeds need different numbers of trials: they are averaged by iteration.
            place = float(point.iteration) if point.method == SANDBLASTER else point.passes
            curves.setdefault(key, {}).setdefault(place, []).append(point)
    for (method, workers, rate), by_place in curves.items():
        of_places = list(by_place.values())
        axis.plot(
            [fmean(point.passes for point in together) for together in of_places],
            [fmean(point.loss for point in together) for together in of_places],
            color=COLOURS[method],
            label=label(method, workers) + (f", rate {rate:g}" if rate else ""),
        )
    axis.set(xlabel="passes over the data", ylabel="training loss", yscale="log", xlim=(0, training.PASSES))
    axis.set_title("Loss by passes over the data")
    axis.legend(fontsize="small")


def _draw_times(axis: Axes, times: Sequence[TimeToTarget]) -> None:
    names = [label(time.method, time.workers) for time in times]
    axis.barh(names, [time.mean for time in times], color=[COLOURS[time.method] for time in times])
    for place, time in enumerate(times):
        axis.plot(time.seconds, [place] * len(time.seconds), ".", color="black", markersize=4)
        axis.annotate(f"  {time.mean:.0f} s", (max(time.seconds), place), va="center", fontsize="small")
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.margins(x=0.15)
    axis.set(xlabel="virtual seconds (logarithmic)", title=f"Time to {100 * training.TARGET_ERROR:.0f} % test error")


def _draw_makespans(axis: Axes, makespans: Sequence[Makespan]) -> None:
    for place, mode in enumerate(balance.MODES):
        values = [row.makespan for row in makespans if row.mode == mode and not row.pass_number]
        axis.bar(place, fmean(values), color="lightgray", edgecolor="gray")
        axis.plot([place] * len(values), values, ".", color="black", markersize=4)
        axis.annotate(f"{fmean(values):.2f}", (place, max(values)), (0, 4), textcoords="offset points", ha="center")
    axis.axhline(1, color="black", linewidth=1, linestyle="--", label="ideal")
    axis.set_xticks(range(len(balance.MODES)), [MODE_NAMES[mode] for mode in balance.MODES])
    axis.margins(y=0.12)
    slow = f"{balance.SLOW_WORKERS} of {balance.WORKERS} workers {balance.SLOWDOWN} times as slow"
    axis.set(ylabel="time of a pass, ideal = 1", title=f"A pass with {slow}")
    axis.legend()


def _draw_bytes(axis: Axes, workers: Sequence[WorkerTraffic]) -> None:
    places = range(len(workers))
    bottoms = [0.0] * len(workers)
    for name, colour in (("gradients", "tab:red"), ("parameters", "tab:orange"), ("other", "tab:gray")):
        values = [getattr(row, name) for row in workers]
        axis.bar(places, values, bottom=bottoms, color=colour, label=f"Sandblaster: {name}")
        bottoms = [bottom + value for bottom, value in zip(bottoms, values, strict=True)]
    for place, row in enumerate(workers):
        axis.annotate(f"{100 * row.share:.0f} %", (place, row.total), (0, 3), textcoords="offset points", ha="center")
    downpour = fmean(row.downpour for row in workers)
    axis.axhline(downpour, color="tab:blue", label="Downpour, each minibatch of 8")
    axis.axhline(downpour / 10, color="tab:blue", linestyle=":", label="a tenth of it")
    # Room for the last bar's label.
    axis.margins(y=0.1)
    axis.set_xticks(places, [str(row.workers) for row in workers])
    axis.set(xlabel="workers, ten portions each", ylabel="bytes an example", title="Traffic, --fold group:k=4")
    axis.legend(fontsize="small")
