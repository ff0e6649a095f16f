"""Does a bound on how far workers get apart train sooner than a barrier and than no bound?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from experiments.harness import Condition, Experiment, Measure, Results, beside, control
from experiments.training import Training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BOUNDS = (0, 1, 3, 10)
PROTOCOLS = (*(f"ssp:s={bound}" for bound in BOUNDS), "downpour")
RATES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
TARGET_LOSS = 0.2


def trials(seeds: Sequence[int]) -> Iterator[Training]:
    for seed in seeds:
        for slow in (1.0, 4.0):
            for protocol in PROTOCOLS:
                for rate in RATES:
                    yield Training(
                        seed=seed,
                        protocol=protocol,
                        workers=8,
                        batch=8,
                        epochs=15.0,
                        drop=1.0,
                        rule="sgd",
                        rate=rate,
                        timing="lognormal:0.3",
                        slow=slow,
                        target=TARGET_LOSS,
                    )


def rate_of_work(results: Results, protocol: str, slow: float) -> float:
    """Gradients a second."""
    return 15 * 1437 / 8 / results.mean("virtual_seconds", protocol=protocol, slow=slow)


def soonest(results: Results, protocol: str, slow: float = 1.0) -> float:
    return results.soonest(protocol=protocol, slow=slow)


def gain(over: str, slow: float = 1.0) -> Measure:
    """How many times as long another takes as s = 3, the default."""
    return lambda results: soonest(results, over, slow) / soonest(results, "ssp:s=3", slow)


def draw(figure: Figure, results: Results) -> None:
    work, time = figure.subplots(1, 2)
    for slow, label in ((1.0, "alike"), (4.0, "one four times slower")):
        work.plot(PROTOCOLS, [rate_of_work(results, each, slow) for each in PROTOCOLS], "-o", label=label)
        time.plot(PROTOCOLS, [soonest(results, each, slow) for each in PROTOCOLS], "-o", label=label)
    work.set(ylabel="gradients a second", ylim=(0, None))
    time.set(ylabel="seconds to the target loss, best rate", ylim=(0, None))
    for axis in (work, time):
        axis.tick_params(axis="x", labelsize="small")
    work.legend()


EXPERIMENT = Experiment(
    name="ssp_staleness",
    title="A bound on staleness (SSP) trains sooner than a barrier and than no bound",
    in_short="A bound of 3 is quicker than a barrier, and not than no bound. All workers draw from the same data.",
    paper="Ho et al. 2013",
    section="abstract",
    claim="""With a bound s on how many steps a worker may be ahead of the slowest, workers spend more time on
    computing than behind a barrier, and the bound, unlike full asynchrony, keeps the algorithm right: so it converges
    faster.""",
    setting="""8 workers train the digits with minibatches of 8 by SGD, 15 epochs; compute times log-normal with sigma
    0.3, alike or one four times slower. s of 0 (a barrier before each step), 1, 3 and 10, and no bound (`downpour`),
    each at the best of six rates from 0.02 to 1; the target is a training loss of 0.2.""",
    trials=trials,
    pilot=(0,),
    pilot_chose="rates and target; s = 3 is the default of `ssp`",
    conditions=(
        control(
            "no bound: error",
            lambda results: results.least("test_error", "rate", protocol="downpour", slow=1.0)[0],
            at_most=0.08,
            unit="%",
        ),
        *(
            Condition(
                f"{workers}: time to the target {of} over that of s = 3",
                gain(over, slow),
                at_least=1.05,
                opposite=0.95,
                unit="x",
            )
            for slow, workers in ((1.0, "alike"), (4.0, "one slow"))
            for over, of in (("ssp:s=0", "of s = 0"), ("downpour", "without a bound"))
        ),
        beside(
            "alike: gradients a second, s = 3 over s = 0",
            lambda results: rate_of_work(results, "ssp:s=3", 1.0) / rate_of_work(results, "ssp:s=0", 1.0),
            at_least=1.2,
            unit="x",
        ),
        beside(
            "one slow: gradients a second without a bound over s = 10",
            lambda results: rate_of_work(results, "downpour", 4.0) / rate_of_work(results, "ssp:s=10", 4.0),
            at_least=1.2,
            unit="x",
        ),
    ),
    shows_not="""What SSP saves in messages: a worker here pulls before every step, while Ho's reads from a cache that
    the bound allows to be old. Nor workers with data of their own, whose bias a bound limits.""",
    reading="""A barrier takes 1.3 to 1.4 times as long to the target as a bound of 3, with machines alike and with one
    slow. No bound is as quick where machines are alike. Where one is four times slower, a bound of 3 takes 2.7 times as
    long as no bound: all wait for the slow one once it is 3 steps behind, while without a bound its few gradients,
    however stale, do no harm here. There a bound of 10 takes 32 s and one of 3 59 s, although both make 2.0 gradients a
    second over the whole run: with a bound of 10 the seven others make ten steps before they first wait, which is half
    of the 140 gradients that either needs.""",
    draw=draw,
    quick={"epochs": 2.0, "target": 2.2},
)
