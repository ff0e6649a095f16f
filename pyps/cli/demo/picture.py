"""Draws a training run: loss and accuracy over time, and how stale the gradients were."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

# Of the gradients; a few stragglers would make the histogram all tail.
SHOWN_SHARE = 0.99
# The histogram's axis reaches at least this far: a lone bar at zero must look like a bar.
LEAST_SPAN = 5


def draw(
    path: Path,
    *,
    losses: Sequence[tuple[float, float]],
    accuracies: Sequence[tuple[float, float]],
    wanted_accuracy: float,
    staleness: Mapping[int, int],
    num_shards: int,
    title: str,
) -> None:
    """Writes the picture to `path`; losses and accuracies are (seconds, value) pairs.

    `staleness` counts shards, of which each push has `num_shards`.
    """
    # Figure alone draws without a display, which pyplot might ask for.
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, MaxNLocator, StrMethodFormatter

    figure = Figure(figsize=(11, 4), layout="constrained")
    figure.suptitle(title)
    over_time, histogram = figure.subplots(1, 2, width_ratios=(3, 2))

    over_time.plot(*zip(*losses, strict=True), color="tab:orange", label="training loss (left)")
    # Logarithmic: from the first parameters' loss on, all else would be a flat line.
    over_time.set(xlabel="seconds", ylabel="training loss (logarithmic)", yscale="log")
    over_time.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    over_time.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    over_time.minorticks_off()
    accuracy_axis = over_time.twinx()
    accuracy_axis.plot(*zip(*accuracies, strict=True), color="tab:blue", label="held-out accuracy (right)")
    accuracy_axis.set(ylabel="held-out accuracy", ylim=(least_shown(accuracies), 1))
    accuracy_axis.axhline(
        wanted_accuracy, color="tab:blue", linewidth=1.2, linestyle=":", label=f"accuracy {wanted_accuracy:g}"
    )
    lines = [*over_time.get_lines(), *accuracy_axis.get_lines()]
    # Above the axes, where no curve can be.
    over_time.legend(lines, [str(line.get_label()) for line in lines], loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
    over_time.set_xlim(0, None)

    values = shown_values(staleness)
    histogram.bar(values, [staleness[value] for value in values], color="tab:green", width=0.9)
    last, oldest = max(values, default=0), max(staleness, default=0)
    histogram.set_xlim(-0.6, max(last, LEAST_SPAN) + 0.6)
    histogram.xaxis.set_major_locator(MaxNLocator(integer=True))
    largest = f"max {oldest}, not shown" if oldest > last else f"max {oldest}"
    histogram.set(xlabel="staleness (versions)", title=f"Staleness ({largest})")
    histogram.set_ylabel("pushes" if num_shards == 1 else f"pushes, each counted for all {num_shards} shards")

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def shown_values(staleness: Mapping[int, int]) -> list[int]:
    """The smallest values that together hold nearly all gradients, in order."""
    total = sum(staleness.values())
    shown: list[int] = []
    count = 0
    for value in sorted(staleness):
        if count >= SHOWN_SHARE * total:
            break
        shown.append(value)
        count += staleness[value]
    return shown


def least_shown(accuracies: Sequence[tuple[float, float]]) -> float:
    """Where the axis of the accuracy begins: at the tenth below the least of it, at a half or lower."""
    least = min((value for _, value in accuracies), default=0.0)
    # A run that was first seen late must not make a small change look large.
    return min(0.5, math.floor(10 * least) / 10)
