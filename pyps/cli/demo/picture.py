"""Draws a training run: loss and accuracy over time, and how stale the gradients were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def draw(
    path: Path,
    *,
    losses: Sequence[tuple[float, float]],
    accuracies: Sequence[tuple[float, float]],
    staleness: Mapping[int, int],
    title: str,
) -> None:
    """Writes the picture to `path`; losses and accuracies are (seconds, value) pairs."""
    # Figure alone draws without a display, which pyplot might ask for.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    figure.suptitle(title)
    over_time, histogram = figure.subplots(1, 2, width_ratios=(3, 2))

    over_time.plot(*zip(*losses, strict=True), color="tab:orange", label="training loss (left)")
    over_time.set(xlabel="seconds", ylabel="training loss", ylim=(0, None))
    accuracy_axis = over_time.twinx()
    accuracy_axis.plot(*zip(*accuracies, strict=True), color="tab:blue", label="held-out accuracy (right)")
    accuracy_axis.set(ylabel="held-out accuracy", ylim=(0, 1))
    accuracy_axis.axhline(0.95, color="tab:blue", linewidth=0.8, linestyle=":")
    lines = [*over_time.get_lines(), accuracy_axis.get_lines()[0]]
    accuracy_axis.legend(lines, [str(line.get_label()) for line in lines], loc="center right")
    over_time.set_xlim(0, None)

    values = sorted(staleness)
    histogram.bar(values, [staleness[value] for value in values], color="tab:green", width=0.9)
    histogram.set(xlabel="staleness (versions)", ylabel="pushed shards", title="Staleness of the gradients")

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
