"""The picture of experiments/model_parallel.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colour and line of each network; those that are judged are drawn through.
STYLES = {
    "dense": ("tab:red", "-"),
    "local": ("tab:blue", "-"),
    "local, at dense's speed": ("tab:blue", ":"),
    "dense, 512 outputs": ("tab:red", ":"),
}


class Point(Protocol):
    """A network on so many machines, and wires, as the experiment has it."""

    @property
    def network(self) -> str: ...
    @property
    def machines(self) -> int: ...
    @property
    def bandwidth_factor(self) -> float: ...
    @property
    def message_factor(self) -> float: ...
    @property
    def seconds(self) -> float: ...
    @property
    def work_seconds(self) -> float: ...
    @property
    def speed_up(self) -> float: ...


def draw(path: Path, points: Sequence[Point], scenario: str) -> None:
    """Draws the speed-up over the number of machines, with its band, and the share of the time that is computing."""
    # Figure alone draws without a display, which pyplot might ask for.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5), layout="constrained")
    figure.suptitle(f"A network cut over virtual machines: {scenario}", fontsize="medium")
    speed_axis, share_axis = figure.subplots(1, 2)
    machines = sorted({point.machines for point in points})
    for network, (colour, style) in STYLES.items():
        rows = [[p for p in points if (p.network, p.machines) == (network, count)] for count in machines]
        stated = [next(p for p in row if p.bandwidth_factor == p.message_factor == 1) for row in rows]
        speed_axis.plot(
            machines, [p.speed_up for p in stated], color=colour, linestyle=style, marker="o", label=network
        )
        if style == "-":
            least = [min(p.speed_up for p in row) for row in rows]
            most = [max(p.speed_up for p in row) for row in rows]
            speed_axis.fill_between(machines, least, most, color=colour, alpha=0.15, linewidth=0)
        shares = [100 * p.work_seconds / p.seconds for p in stated]
        share_axis.plot(machines, shares, color=colour, linestyle=style, marker="o", label=network)
    speed_axis.plot(machines, machines, color="gray", linewidth=1, linestyle="--", label="ideal")
    speed_axis.set_yscale("log", base=2)
    speed_axis.yaxis.set_major_formatter("{x:g}")
    speed_axis.set(ylabel="times as quick as one machine", title="Speed-up of a minibatch, forward and backward")
    share_axis.set(ylabel="% of the time of a minibatch", ylim=(0, 105), title="The busiest machine computes")
    for axis in (speed_axis, share_axis):
        _machines_below(axis, machines)
    speed_axis.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _machines_below(axis: Axes, machines: Sequence[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(machines, [str(count) for count in machines])
    axis.minorticks_off()
    axis.set_xlabel("machines")
