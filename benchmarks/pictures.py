"""The pictures of the document, drawn from the benchmarks' results. Each returns whether there was anything to draw."""

from __future__ import annotations

import math
from operator import itemgetter
from pathlib import Path
from typing import Any

import figures
import matplotlib
from figures import Results

matplotlib.use("Agg")  # It needs no screen.
from matplotlib import pyplot
from matplotlib.ticker import FuncFormatter

STYLES: dict[str, dict[str, Any]] = {
    figures.SHARED_MEMORY: {"color": "#0b4f9e", "marker": "o"},
    figures.LANE: {"color": "#2e7d32", "marker": "P"},
    figures.LANE_TLS: {"color": "#2e7d32", "marker": "P", "linestyle": "--"},
    figures.LANE_BFLOAT16: {"color": "#81b784", "marker": "P", "linestyle": ":"},
    figures.LANE_INT4: {"color": "#b5d3b6", "marker": "P", "linestyle": "-."},
    figures.GRPC: {"color": "#00786c", "marker": "s"},
    figures.GRPC_BFLOAT16: {"color": "#43b5a5", "marker": "s", "linestyle": ":"},
    "torch RPC auto": {"color": "#c1440e", "marker": "^"},
    "torch RPC tcp": {"color": "#e79a78", "marker": "^", "linestyle": "--"},
    "TensorFlow gRPC": {"color": "#a67c00", "marker": "v", "linestyle": "--"},
    "Ray": {"color": "#7d4f9e", "marker": "D", "linestyle": "--"},
    "naive gRPC": {"color": "#888888", "marker": "x", "linestyle": "--"},
}
SIZES = {"small": "10 thousand parameters", "mid": "1 million parameters", "big": "25.6 million parameters"}


def draw_all(results: Results, folder: Path) -> dict[str, str]:
    """Draws what there are results for; the pictures' file names by their keys."""
    pictures = {
        "rounds_by_size": rounds_by_size,
        "rounds_by_workers": rounds_by_workers,
        "link": link,
        "load": load,
        "local_training": local_training,
        "soak": soak,
    }
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {}
    for key, draw in pictures.items():
        figure = draw(results)
        if figure is not None:
            drawn[key] = file_name(key)
            figure.savefig(folder / drawn[key], dpi=110, bbox_inches="tight")
            pyplot.close(figure)
    return drawn


def file_name(key: str) -> str:
    return f"{'robustness' if key == 'soak' else 'performance'}_{key}.png"


def rounds_by_size(results: Results) -> Any:
    """Rounds per second against the model's size, one worker."""
    found = figures.rows(results, "rounds", workers=1)
    if not found:
        return None
    figure, axes = pyplot.subplots(figsize=(8.5, 5))
    for subject in figures.subjects(found):
        sizes = sorted({row["params"] for row in found if row["subject"] == subject})
        speeds = [figures.median(_of(found, params=size), subject) or math.nan for size in sizes]
        axes.plot(sizes, speeds, label=subject, **STYLES.get(subject, {}))
    _logarithmic(axes, "parameters", "rounds per second")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_title("Push and pull of the whole model, one worker")
    _legend(axes)
    return figure


def rounds_by_workers(results: Results) -> Any:
    """Rounds per second of all workers together, a panel a size."""
    found = figures.rows(results, "rounds")
    sizes = [size for size in SIZES if len({row["workers"] for row in found if row["size"] == size}) > 1]
    if not sizes:
        return None
    figure, panels = pyplot.subplots(1, len(sizes), figsize=(4.2 * len(sizes), 4.4), squeeze=False)
    for axes, size in zip(panels[0], sizes, strict=True):
        of_size = [row for row in found if row["size"] == size]
        counts = sorted({row["workers"] for row in of_size})
        for subject in figures.subjects(of_size):
            points = [(count, figures.median(_of(of_size, workers=count), subject)) for count in counts]
            points = [(count, speed) for count, speed in points if speed is not None]
            axes.plot(*zip(*points, strict=True), label=subject, **STYLES.get(subject, {}))
        axes.set_title(SIZES[size], fontsize=10)
        axes.set_xlabel("workers")
        axes.set_xticks(counts)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("rounds per second, all workers together")
    _legend(panels[0][-1])
    return figure


def link(results: Results) -> Any:
    """Rounds per second over links, as bars next to the most that a link allows."""
    found = figures.rows(results, "link")
    if not found:
        return None
    rates = list(dict.fromkeys(row["rate"] for row in found))
    names = [name for name in figures.subjects(found) if name != figures.PLAIN_TCP]
    figure, panels = pyplot.subplots(1, len(rates), figsize=(4.6 * len(rates), 4.2), squeeze=False)
    for axes, rate in zip(panels[0], rates, strict=True):
        of_rate = _of(found, rate=rate)
        for index, name in enumerate(names):
            if measured := figures.values(of_rate, name):
                speed = figures.median(of_rate, name)
                assert speed is not None
                error = [[speed - min(measured)], [max(measured) - speed]]
                axes.bar(index, speed, yerr=error, capsize=3, color=STYLES.get(name, {}).get("color"))
        if most := figures.median(of_rate, figures.PLAIN_TCP):
            axes.axhline(most, color="black", linewidth=1, linestyle=":")
            axes.set_ylim(top=1.2 * max(most, axes.get_ylim()[1] / 1.05))
            words = "float32, both ways at once,\nat plain TCP's speed"
            axes.annotate(words, (len(names) - 0.5, most), fontsize=8, ha="right", va="bottom")
        axes.set_xticks(range(len(names)), names, rotation=35, ha="right", fontsize=8)
        axes.set_title(f"{rate.removesuffix('gbit')} Gbit/s each way", fontsize=10)
        axes.grid(alpha=0.3, axis="y")
    panels[0][0].set_ylabel("rounds per second, 25.6 million parameters")
    return figure


def load(results: Results) -> Any:
    """Updates per second and latency against the number of workers."""
    found = figures.rows(results, "load")
    if not found:
        return None
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2))
    for subject in figures.subjects(found):
        of_subject = sorted(_of(found, subject=subject), key=lambda row: row["workers"])
        counts = [row["workers"] for row in of_subject]
        style = STYLES.get(subject, {})
        left.plot(counts, [row["updates_per_s"] for row in of_subject], label=subject, **style)
        right.plot(counts, [row["p50_ms"] for row in of_subject], label=f"{subject}, p50", **style)
        right.plot(counts, [row["p99_ms"] for row in of_subject], label=f"{subject}, p99", **style | {"linestyle": ":"})
    left.set_ylim(bottom=0)
    left.set_xscale("log", base=2)
    left.set_ylabel("updates per second")
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    right.set_ylabel("ms a round")
    for axes in (left, right):
        axes.set_xlabel("workers")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=8)
    return figure


def local_training(results: Results) -> Any:
    """The loss of held-out text over time, a panel a case of local_training.py; of the first seed."""
    found = figures.rows(results, "local_training", seed=0)
    if not found:
        return None
    cases = list(dict.fromkeys((row["case"], row["workers"]) for row in found))
    columns = min(3, len(cases))
    num_rows = -(-len(cases) // columns)
    figure, grid = pyplot.subplots(num_rows, columns, figsize=(5.2 * columns, 4.4 * num_rows), squeeze=False)
    names = list(dict.fromkeys(row["subject"] for row in found))
    colors = pyplot.get_cmap("tab20")
    best = min(min(row["curve"], key=itemgetter(2))[2] for row in found)
    panels = grid.flat[: len(cases)]
    for axes, (case, workers) in zip(panels, cases, strict=True):
        for row in _of(found, case=case, workers=workers):
            name = row["subject"]
            times, _, losses = zip(*row["curve"], strict=True)
            axes.plot(
                times,
                losses,
                label=name,
                linestyle="-" if name.startswith("pyps") else "--",
                color=colors(names.index(name) % colors.N),
            )
        axes.set_title(f"{case}, {workers} workers", fontsize=10)
        axes.set_xlabel("seconds")
        # Below, curves lie close together.
        axes.set_ylim(best - 0.05, best + 0.75)
        axes.grid(alpha=0.3)
    for axes in grid[:, 0]:
        axes.set_ylabel("loss of held-out text")
    for axes in grid.flat[len(cases) :]:
        axes.set_axis_off()
    _legend(grid[0][-1], *panels)
    figure.tight_layout()
    return figure


def _of(found: list[figures.Row], **where: Any) -> list[figures.Row]:
    return [row for row in found if all(row.get(name) == value for name, value in where.items())]


def _logarithmic(axes: Any, x: str, y: str) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(alpha=0.3, which="both")


def _legend(axes: Any, *panels: Any) -> None:
    """Beside `axes`, of what is in it, or in `panels`."""
    lines = {line.get_label(): line for each in panels or [axes] for line in each.get_legend_handles_labels()[0]}
    axes.legend(handles=lines.values(), fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))


def soak(results: Results) -> Any:
    """Memory, descriptors and threads of each server over time, a panel each."""
    found = figures.rows(results, "soak")
    if not found:
        return None
    names = {"memory_mb": "memory, MB", "descriptors": "open descriptors", "threads": "threads"}
    figure, panels = pyplot.subplots(1, len(names), figsize=(4.2 * len(names), 3.4))
    for axes, (column, name) in zip(panels, names.items(), strict=True):
        for server in sorted({row["server"] for row in found}):
            of_server = _of(found, server=server)
            minutes = [row["at_s"] / 60 for row in of_server]
            axes.plot(minutes, [row[column] for row in of_server], label=f"server {server}", linewidth=1)
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("minutes")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    return figure
