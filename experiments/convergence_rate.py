"""Does staleness-aware SGD converge as fast as SGD, O(1/sqrt(T)) in T updates?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from experiments import digits_network
from experiments.harness import Condition, Experiment, Measure, Results, beside, control
from experiments.training import COLORS, Training, digits

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORKERS = 16
UPDATES = (250, 500, 1000, 2000, 4000)
RATES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
SERIAL, FEW, MANY = "serial", "softsync:n=4", "softsync:n=16"
LOOKS = 50


@dataclass(frozen=True, kw_only=True)
class Convergence(Training):
    """A training of T updates at a constant rate; the mean of the squared full gradient along it."""

    total: int
    # A short run makes this share of the updates.
    share: float = 1.0

    def measure(self) -> dict[str, float]:
        task = digits()
        simulation = self.simulation(task)
        [shard] = simulation.shards
        squares = []
        for look in range(LOOKS):
            while shard.version < self.share * self.total * look // LOOKS:
                simulation.run(pushes=simulation.num_taken + 1)
            gradient = digits_network.loss_gradient(shard.state().parameters, task.images, task.labels)
            squares.append(float(np.square(gradient.astype(np.float64)).sum()))
        mean = float(np.mean(squares))
        return {"squared_gradient": min(mean, 1e6) if np.isfinite(mean) else 1e6}


def trials(seeds: Sequence[int]) -> Iterator[Convergence]:
    for seed in seeds:
        for protocol, workers in ((SERIAL, 1), (FEW, WORKERS), (MANY, WORKERS)):
            for policy in ("none", "divide") if workers > 1 else ("none",):
                for rate in RATES:
                    for total in UPDATES:
                        yield Convergence(
                            seed=seed,
                            protocol=protocol,
                            workers=workers,
                            staleness=policy,
                            rate=rate,
                            total=total,
                            rule="sgd",
                            batch=8,
                            drop=1.0,
                        )


def curve(results: Results, protocol: str, policy: str) -> list[float]:
    """The mean squared gradient by T, each at its own best rate."""
    return [
        results.least("squared_gradient", "rate", protocol=protocol, staleness=policy, total=total)[0]
        for total in UPDATES
    ]


def slope(protocol: str, policy: str = "divide") -> Measure:
    """The exponent of T, by least squares of the logarithms."""
    return lambda results: float(np.polyfit(np.log(UPDATES), np.log(curve(results, protocol, policy)), 1)[0])


def draw(figure: Figure, results: Results) -> None:
    axis = figure.subplots()
    for protocol, policy in ((SERIAL, "none"), (FEW, "none"), (FEW, "divide"), (MANY, "none"), (MANY, "divide")):
        values = curve(results, protocol, policy)
        label = f"{protocol}, {policy}: T^{slope(protocol, policy)(results):.2f}"
        color, style = ("black", "-o") if protocol == SERIAL else (COLORS[policy], "--s" if protocol == FEW else "-o")
        axis.plot(UPDATES, values, style, color=color, markersize=4, label=label)
    first = curve(results, SERIAL, "none")[0]
    axis.plot(UPDATES, [first * (total / UPDATES[0]) ** -0.5 for total in UPDATES], "k:", label="T^-0.5")
    axis.set(xscale="log", yscale="log", xlabel="updates T", ylabel="mean squared gradient\n(best rate for each T)")
    axis.set_xticks(UPDATES, map(str, UPDATES))
    axis.minorticks_off()
    figure.legend(loc="outside right center", fontsize="small")


EXPERIMENT = Experiment(
    name="convergence_rate",
    title="Staleness-aware SGD converges as SGD does, O(1/√T)",
    in_short="All fall faster than the bound, `none` as well; a slope over T of 250 to 4,000 is no proof of an order.",
    paper="Zhang et al. 2016",
    section="introduction and theory",
    claim="""The convergence rate of staleness-aware asynchronous SGD "is consistent with SGD: O(1/√T), where T is the
    number of gradient update steps".""",
    setting="""T of 250 to 4,000 updates of the digits' network by SGD without momentum, minibatches of 8, compute
    times normal with a variation of 0.1; serial, and 4- and 16-softsync of 16 workers with `divide` and with `none`.
    What falls is the mean squared length of the full gradient along the run, as in the theorem, which sets the rate
    by T: so for each T the best of six rates from 0.03 to 10 is taken. The exponent of T is fitted to the five T.""",
    trials=trials,
    pilot=(0,),
    pilot_chose="""the range of T and of rates; exponents of -0.56 (serial), -0.34 and -0.05 (softsync) had been seen
    at one rate for all T""",
    conditions=(
        control("serial: exponent of T", slope(SERIAL, "none"), at_most=-0.4),
        Condition("4-softsync, `divide`: exponent of T", slope(FEW), at_most=-0.4, opposite=-0.1),
        Condition("16-softsync, `divide`: exponent of T", slope(MANY), at_most=-0.4, opposite=-0.1),
        beside("4-softsync, `none`: exponent of T", slope(FEW, "none"), at_most=-0.4),
        beside("16-softsync, `none`: exponent of T", slope(MANY, "none"), at_most=-0.4),
        beside(
            "T = 4000: squared gradient of 16-softsync with `divide` over that of serial training",
            lambda results: curve(results, MANY, "divide")[-1] / curve(results, SERIAL, "none")[-1],
            at_most=1.5,
            unit="x",
        ),
    ),
    shows_not="""An order of convergence: a slope over a factor of 16 in T is no limit, and a bound may be met by far.
    One update of 4-softsync is the mean of four gradients.""",
    reading="""All five curves fall at least as fast as the bound allows, serial training among them; with 16 workers
    the constant before it is 1.5 times that of serial training after as many updates. `none` falls as fast as
    `divide`: each finds its own rate, a third to a tenth as large without division.""",
    draw=draw,
    quick={"share": 0.1},
)
