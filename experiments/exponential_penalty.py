"""Does an exponential penalty make the rate vanish where the staleness is hundreds?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from experiments.harness import Condition, Experiment, Measure, Results, beside, control
from experiments.large_rates import EXPERIMENT as BASE
from experiments.training import Training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEARNERS = (5, 30, 300)
POLICIES = ("divide", "exponential:beta=0.1", "exponential:beta=0.5")
RATES = (0.05, 0.2, 1.0, 5.0)


def trials(seeds: Sequence[int]) -> Iterator[Training]:
    for seed in seeds:
        for workers in LEARNERS:
            for policy in POLICIES:
                for rate in RATES:
                    yield Training(seed=seed, staleness=policy, workers=workers, rate=rate, timing="lognormal:0.15")


def best(results: Results, policy: str, workers: int) -> float:
    return results.least("test_error", "rate", staleness=policy, workers=workers)[0]


def worse(policy: str, workers: int) -> Measure:
    """How much more it errs than `divide`, each at its own best rate."""
    return lambda results: best(results, policy, workers) - best(results, "divide", workers)


def draw(figure: Figure, results: Results) -> None:
    axis = figure.subplots()
    for policy in POLICIES:
        axis.plot(LEARNERS, [100 * best(results, policy, workers) for workers in LEARNERS], "-o", label=policy)
    axis.set(xscale="log", xlabel="learners", ylabel="held-out error in % at the best rate", ylim=(0, None))
    axis.set_xticks(LEARNERS, map(str, LEARNERS))
    axis.minorticks_off()
    axis.legend()


EXPERIMENT = Experiment(
    name="exponential_penalty",
    title="An exponential penalty makes the rate vanish where staleness is hundreds, and does well with five learners",
    paper=BASE.paper,
    section="introduction, on Chan and Lane 2014",
    claim="""With up to 5 learners an exponential penalty for stale gradients works; in larger systems staleness "can
    assume values up to a few hundreds", and the penalty may reduce the rate to an arbitrarily small value, and slow
    the convergence down.""",
    setting="""5, 30 and 300 workers train the digits by `async`, as for large rates; compute times log-normal with
    sigma 0.15, so that the mean staleness is 4, 29 and 299. Weights e^(-0.1 τ) and e^(-0.5 τ) against 1/τ, each at
    the best of four rates from 0.05 to 5.""",
    trials=trials,
    pilot=(0,),
    pilot_chose="the rates",
    conditions=(
        control(
            "`divide`, 300 learners: least error", lambda results: best(results, "divide", 300), at_most=0.1, unit="%"
        ),
        Condition(
            "5 learners, beta 0.1: error above that of `divide`", worse(POLICIES[1], 5), at_most=0.02, unit="points"
        ),
        Condition(
            "300 learners, beta 0.1: error above that of `divide`",
            worse(POLICIES[1], 300),
            at_least=0.1,
            opposite=0.0,
            unit="points",
        ),
        Condition(
            "300 learners, beta 0.5: error above that of `divide`",
            worse(POLICIES[2], 300),
            at_least=0.1,
            opposite=0.0,
            unit="points",
        ),
        beside(
            "30 learners, beta 0.1: error above that of `divide`", worse(POLICIES[1], 30), at_most=0.02, unit="points"
        ),
        beside(
            "30 learners, beta 0.5: error above that of `divide`", worse(POLICIES[2], 30), at_least=0.1, unit="points"
        ),
        beside(
            "5 learners, beta 0.5: error above that of `divide`", worse(POLICIES[2], 5), at_most=0.02, unit="points"
        ),
    ),
    shows_not="""Chan and Lane's own beta, which is not known to us. A rate as large as the penalty is small would
    undo it where all gradients are equally stale; none above 5 was tried.""",
    draw=draw,
    quick={"epochs": 1.0},
)
