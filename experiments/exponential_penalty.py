"""Does an exponential penalty make the rate vanish where the staleness is hundreds?"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from math import exp
from typing import TYPE_CHECKING

from experiments.harness import Condition, Experiment, Measure, Results, beside, control
from experiments.large_rates import EXPERIMENT as BASE
from experiments.training import COLORS, Training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEARNERS = (5, 30, 300)
POLICIES = ("divide", "exponential:beta=0.1", "exponential:beta=0.5")
RATES = (0.05, 0.2, 1.0, 5.0)
# Undone where all gradients are as stale as the mean: these rates times the mean's penalty turned round.
UNDONE, UNDONE_RATES = POLICIES[1], (0.05, 0.2)


def trials(seeds: Sequence[int]) -> Iterator[Training]:
    for seed in seeds:
        for workers in LEARNERS:
            for policy in POLICIES:
                undone = [rate * exp(0.1 * (workers - 1)) for rate in UNDONE_RATES] if policy == UNDONE else []
                for rate in (*RATES, *undone):
                    yield Training(seed=seed, staleness=policy, workers=workers, rate=rate, timing="lognormal:0.15")


def best(results: Results, policy: str, workers: int, *, rates: Container[float] = RATES) -> float:
    chosen = Results(row for row in results.rows if row["rate"] in rates)
    return chosen.least("test_error", "rate", staleness=policy, workers=workers)[0]


def worse(policy: str, workers: int) -> Measure:
    """How much more it errs than `divide`, each at its own best rate."""
    return lambda results: best(results, policy, workers) - best(results, "divide", workers)


def undone(results: Results, workers: int) -> float:
    rates = [rate for rate in results.where(staleness=UNDONE, workers=workers).distinct("rate") if rate not in RATES]
    return best(results, UNDONE, workers, rates=rates)


def draw(figure: Figure, results: Results) -> None:
    axis = figure.subplots()
    for policy in POLICIES:
        axis.plot(
            LEARNERS,
            [100 * best(results, policy, workers) for workers in LEARNERS],
            "-o",
            color=COLORS[policy],
            label=policy,
        )
    axis.plot(
        LEARNERS,
        [100 * undone(results, workers) for workers in LEARNERS],
        "--o",
        color=COLORS[UNDONE],
        label=f"{UNDONE}, undone",
    )
    axis.set(xscale="log", xlabel="learners", ylabel="held-out error in % at the best rate", ylim=(0, None))
    axis.set_xticks(LEARNERS, map(str, LEARNERS))
    axis.minorticks_off()
    axis.legend()


EXPERIMENT = Experiment(
    name="exponential_penalty",
    title="An exponential penalty may make the rate vanish where staleness is in the hundreds",
    in_short="A mild one costs nothing at a staleness of 29, both fail at 299; Chan and Lane's own is not known to us.",
    paper=BASE.paper,
    section="introduction, on Chan and Lane 2014",
    claim="""Chan and Lane penalize stale gradients exponentially, and show results for up to 5 learners. In larger
    systems staleness "can assume values up to a few hundreds", and the penalty "may reduce the learning rate to an
    arbitrarily small value, potentially slowing down the convergence".""",
    setting="""5, 30 and 300 workers train the digits by `async`, as for large rates; compute times log-normal with
    sigma 0.15, so that the mean staleness is 4, 29 and 299. Weights e^(-0.1 τ) and e^(-0.5 τ) against 1/τ, each at
    the best of four rates from 0.05 to 5. That 300 learners learn nothing at these rates follows from e^(-30); whether
    30 do does not. "Undone": rates of 0.05 and 0.2 times e^(0.1 · the mean staleness).""",
    trials=trials,
    pilot=(0,),
    pilot_chose="the rates; that beta 0.1 does well with 5 learners and fails with 300 had been seen",
    conditions=(
        control(
            "`divide`, 300 learners: least error", lambda results: best(results, "divide", 300), at_most=0.1, unit="%"
        ),
        control(
            "5 learners, beta 0.1: error above that of `divide`", worse(POLICIES[1], 5), at_most=0.02, unit="points"
        ),
        Condition(
            "30 learners, beta 0.1: error above that of `divide`",
            worse(POLICIES[1], 30),
            at_least=0.02,
            opposite=-0.005,
            unit="points",
        ),
        Condition(
            "30 learners, beta 0.5: error above that of `divide`",
            worse(POLICIES[2], 30),
            at_least=0.02,
            opposite=-0.005,
            unit="points",
        ),
        Condition(
            "300 learners, beta 0.1, undone by the rate: error above that of `divide`",
            lambda results: undone(results, 300) - best(results, "divide", 300),
            at_least=0.02,
            opposite=-0.005,
            unit="points",
        ),
        *(
            beside(
                f"300 learners, {policy}: error above that of `divide`", worse(policy, 300), at_least=0.1, unit="points"
            )
            for policy in POLICIES[1:]
        ),
        beside(
            "5 learners, beta 0.5: error above that of `divide`", worse(POLICIES[2], 5), at_most=0.02, unit="points"
        ),
    ),
    shows_not="""Chan and Lane's own beta, which is not known to us.""",
    reading="""With 30 learners, at a mean staleness of 29, a mild penalty (beta 0.1) costs nothing, and one of 0.5
    costs 48 points, at the largest rate tried; a larger one might lose less. With 300 both leave the model untrained,
    and a rate that undoes the mean's penalty does not help: the staleness varies, and fresh gradients, the first above
    all, then take steps of any size.""",
    draw=draw,
    quick={"epochs": 1.0},
)
