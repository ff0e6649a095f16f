"""Draws what each protocol does to time: four workers, one half as quick, around the servers' own code in virtual time.

    python experiments/protocol_pictures.py --into docs/images

A bar is a step of a worker, coloured by the staleness that its gradient had on arrival; a cross is a gradient that was
dropped; what is hatched is waiting. Below stands a line for each update.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from pyps.config import ServerConfig
from pyps.core.receipt import Outcome, Receipt
from pyps.core.rule_settings import RuleSettings
from pyps.simulation.event import Kind
from pyps.simulation.server import ServerPlan
from pyps.simulation.simulation import Computed, Simulation, Step, WorkerPlan, normal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PROTOCOLS = ("async", "softsync:n=2", "hardsync", "backup:b=1", "ssp:s=1", "serial")
# Seconds that a step takes on average.
WORKERS = {"worker 0": 1.0, "worker 1": 1.0, "worker 2": 1.0, "worker 3, slow": 2.0}
VARIATION = 0.15
SECONDS = 12.0
COLOURS = ("#2a9d8f", "#8ab17d", "#e9c46a", "#f4a261", "#e76f51", "#9b2226")


@dataclass
class Story:
    """What happened under a protocol, up to SECONDS."""

    # By worker: when a step began and ended, and the answer to its gradient.
    steps: dict[str, list[tuple[float, float, Receipt]]] = field(default_factory=lambda: defaultdict(list))
    updates: list[float] = field(default_factory=list)

    @property
    def waited(self) -> float:
        """The share of the workers' time in which they did not compute."""
        computed = sum(end - start for steps in self.steps.values() for start, end, _ in steps)
        return 1 - computed / sum(steps[-1][1] for steps in self.steps.values())

    @property
    def taken(self) -> list[Receipt]:
        """The answers to gradients that were not dropped."""
        answers = [receipt for steps in self.steps.values() for _, _, receipt in steps]
        return [receipt for receipt in answers if receipt.outcome != Outcome.REJECTED]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=Path("docs/images"), help="folder of the pictures")
    options = parser.parse_args()
    for protocol in PROTOCOLS:
        path = options.into / f"protocol_{protocol.partition(':')[0]}.png"
        draw(path, protocol, tell(protocol))
        print(path)


def tell(protocol: str) -> Story:
    """Runs the workers under the protocol in virtual time."""

    def compute(step: Step) -> Computed:
        return Computed({0: np.ones(1, np.float32)})

    simulation = Simulation(
        [np.zeros(1, np.float32)],
        RuleSettings.make("sgd", ({"learning_rate": 0.1},)),
        ServerConfig(protocol=protocol).behaviour,
        [WorkerPlan(name, normal(mean, variation=VARIATION)) for name, mean in WORKERS.items()],
        compute,
        server=ServerPlan(expected_workers=len(WORKERS)),
        seed=1,
        keep_events=True,
    )
    simulation.run(seconds=SECONDS)
    story, began, version = Story(), {}, 0
    for event in simulation.events:
        if event.kind is Kind.PULL:
            began[event.worker_id] = event.time
        if event.receipt is not None:
            story.steps[event.worker_id].append((began[event.worker_id], event.time, event.receipt))
            if event.receipt.version_after > version:
                version = event.receipt.version_after
                story.updates.append(event.time)
    return story


def draw(path: Path, protocol: str, story: Story) -> None:
    """Draws the story, a row a worker."""
    # Figure alone draws without a display, which pyplot might ask for.
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(9, 2.6), layout="constrained")
    axis: Axes = figure.subplots()
    for row, steps in enumerate(story.steps[name] for name in WORKERS):
        waits_from = 0.0
        for start, end, receipt in steps:
            dropped = receipt.outcome == Outcome.REJECTED
            colour = "white" if dropped else COLOURS[min(receipt.staleness, len(COLOURS) - 1)]
            axis.barh(
                row, start - waits_from, left=waits_from, height=0.7, color="none", edgecolor="0.75", hatch="////"
            )
            axis.barh(row, end - start, left=start, height=0.7, color=colour, edgecolor="0.2", linewidth=0.6)
            if dropped:
                axis.plot((start + end) / 2, row, "x", color=COLOURS[-1])
            waits_from = end
    axis.vlines(story.updates, len(WORKERS) - 0.4, len(WORKERS) + 0.2, color="0.2", linewidth=1)
    axis.set_yticks([*range(len(WORKERS)), len(WORKERS) - 0.1], [*WORKERS, "updates"])
    axis.set_ylim(len(WORKERS) + 0.4, -0.6)
    axis.set_xlim(0, SECONDS)
    axis.set_xlabel("seconds")
    ages = [receipt.staleness for receipt in story.taken]
    axis.set_title(
        f"{protocol}: {len(story.taken)} gradients in {len(story.updates)} updates, mean staleness "
        f"{fmean(ages):.1f}, {story.waited:.0%} of the time waited",
        fontsize=10,
    )
    shown = [Patch(color=COLOURS[age], label=f"{age}{'+' * (age + 1 == len(COLOURS))}") for age in range(len(COLOURS))]
    figure.legend(handles=shown, title="staleness", loc="outside right center", fontsize=8, title_fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
