"""Is the error governed by the product of minibatch and learners, and which rate suits it?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from scipy.stats import rankdata

from experiments.harness import Condition, Experiment, Measure, Results, beside, control
from experiments.training import Training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BATCHES = (4, 8, 16, 32, 64, 128)
LEARNERS = (1, 2, 4, 8, 16, 32)
CELLS = [(batch, workers) for batch in BATCHES for workers in LEARNERS if 32 <= batch * workers <= 1024]
RATES = (0.0625, 0.125, 0.25, 0.5, 1.0, 2.0)
# The examples of an update of the reference, which is one learner, and in how many ways they are divided.
GLOBAL = 128
DIAGONAL = [(GLOBAL // workers, workers) for workers in LEARNERS]
# Hardsync's: for these products, 32 and 512, the rule's rates, half and twice alpha0, are on the grid.
SMALLER, LARGER = (4, 8), (16, 32)
ONE, ASYNC, HARDSYNC = "softsync:n=1", "async", "hardsync"


def trials(seeds: Sequence[int]) -> Iterator[Training]:
    cells = {
        (ONE, "divide"): CELLS,
        (ASYNC, "constant"): DIAGONAL,
        (HARDSYNC, "none"): [*DIAGONAL[::5], SMALLER, LARGER],
    }
    for seed in seeds:
        for (protocol, policy), places in cells.items():
            for batch, workers in places:
                for rate in RATES:
                    yield Training(
                        seed=seed,
                        protocol=protocol,
                        staleness=policy,
                        batch=batch,
                        workers=workers,
                        rate=rate,
                        timing="lognormal:0.15",
                        epochs=5.0,
                    )


def tuned(results: Results, batch: int, workers: int, protocol: str = ONE) -> float:
    """The error at its own best rate."""
    return results.least("test_error", "rate", protocol=protocol, batch=batch, workers=workers)[0]


def at_base(results: Results, batch: int, workers: int, protocol: str = ONE, *, times: float = 1.0) -> float:
    """The error at alpha0, the best rate of the reference, or at so many times it."""
    base = results.least("test_error", "rate", protocol=ONE, batch=GLOBAL, workers=1)[1]
    rate = min(max(times * base, RATES[0]), RATES[-1])
    return results.mean("test_error", protocol=protocol, batch=batch, workers=workers, rate=rate)


def correlations(results: Results, *, is_tuned: bool) -> tuple[float, float]:
    """Spearman's of the error and the product, and of the error and the learners where the product is fixed."""
    errors = [(tuned if is_tuned else at_base)(results, *cell) for cell in CELLS]
    columns = errors, [batch * workers for batch, workers in CELLS], [workers for _, workers in CELLS]
    matrix = np.corrcoef([rankdata(column) for column in columns])
    of_product, of_learners, both = matrix[0, 1], matrix[0, 2], matrix[1, 2]
    partial = (of_learners - of_product * both) / np.sqrt((1 - of_product**2) * (1 - both**2))
    return float(of_product), float(partial)


def of_product(*, is_tuned: bool) -> Measure:
    return lambda results: correlations(results, is_tuned=is_tuned)[0]


def of_learners(*, is_tuned: bool) -> Measure:
    return lambda results: abs(correlations(results, is_tuned=is_tuned)[1])


def above_reference(protocol: str, cells: Sequence[tuple[int, int]], *, is_tuned: bool = False) -> Measure:
    """By how much the worst of these errs more than the reference, all at alpha0 or each at its own best rate."""
    error = tuned if is_tuned else at_base
    return lambda results: max(error(results, *cell, protocol) for cell in cells) - tuned(results, GLOBAL, 1)


def above_tuned(cell: tuple[int, int], times: float) -> Measure:
    """By how much hardsync errs more at so many times alpha0 than at its best rate."""
    return lambda results: at_base(results, *cell, HARDSYNC, times=times) - tuned(results, *cell, HARDSYNC)


def draw(figure: Figure, results: Results) -> None:
    pictures = (tuned, "its own best rate"), (at_base, "alpha0")
    for axis, (error, title) in zip(figure.subplots(1, 2), pictures, strict=True):
        errors = np.full((len(LEARNERS), len(BATCHES)), np.nan)
        for batch, workers in CELLS:
            row, column = LEARNERS.index(workers), BATCHES.index(batch)
            errors[row, column] = value = 100 * error(results, batch, workers)
            axis.text(column, row, f"{value:.1f}", ha="center", va="center", color="kw"[value < 10])
        axis.imshow(np.log(errors), vmin=np.log(2), vmax=np.log(50), origin="lower", aspect="auto")
        products = np.add.outer(np.log2(LEARNERS), np.log2(BATCHES))
        axis.contour(products, levels=np.arange(4.5, 11), colors="red", linewidths=0.8)
        axis.set_xticks(range(len(BATCHES)), map(str, BATCHES))
        axis.set_yticks(range(len(LEARNERS)), map(str, LEARNERS))
        axis.set(xlabel="minibatch", ylabel="learners", title=f"1-softsync at {title}: error in %")


EXPERIMENT = Experiment(
    name="interplay",
    title="The error is governed by the minibatch times the number of learners",
    in_short="""Over a wide range the product governs the error; at 32 to 128 examples learners count as much. Few
    updates.""",
    paper="Gupta et al. 2016",
    section="abstract; hardsync's rate by reports of it; the fixed product by Zhang et al. 2016",
    claim="""Contours of equal error follow those of minibatch times learners, so that a learner's minibatch should
    shrink as learners are added; the rate then stays. Hardsync's rate is alpha0 times the root of minibatch x learners
    / 128, and 1-softsync's is alpha0.""",
    setting="""1 to 32 workers with minibatches of 4 to 128, 32 to 1,024 examples together, train the digits for 5
    epochs under 1-softsync with `divide`, with momentum 0.9 on the servers, at each of six rates from 1/16 to 2; the
    rate falls to a tenth for the last 15 %; compute times log-normal with sigma 0.15. The reference is one worker with
    minibatches of 128, and alpha0 its best rate. Beside, with 128 examples in all: async with alpha0 / n, hardsync.
    More examples an update mean fewer updates: 225 for 32, 7 for 1,024.""",
    trials=trials,
    pilot=(0,),
    pilot_chose="""epochs, so that the digits are not too easy (20 epochs were), the rates, and the products: below 32
    examples the error was 2 to 3 % everywhere. The thresholds of both correlations were written down before""",
    conditions=(
        control("the reference learns: error", lambda results: tuned(results, GLOBAL, 1), at_most=0.08, unit="%"),
        control(
            "best rates: the error of 1,024 examples above that of 32",
            lambda results: tuned(results, 128, 8) - tuned(results, 32, 1),
            at_least=0.05,
            unit="points",
        ),
        *(
            condition
            for is_tuned, where in ((True, "best rates"), (False, "alpha0"))
            for condition in (
                Condition(
                    f"{where}: rank correlation of the error with the product",
                    of_product(is_tuned=is_tuned),
                    at_least=0.6,
                    opposite=0.0,
                ),
                Condition(
                    f"{where}: size of its partial rank correlation with the learners, at a fixed product",
                    of_learners(is_tuned=is_tuned),
                    at_most=0.3,
                    opposite=0.7,
                ),
            )
        ),
        Condition(
            "alpha0, 128 examples: the worst of 2 to 32 learners errs more than one, by",
            above_reference(ONE, DIAGONAL[1:]),
            at_most=0.02,
            opposite=0.1,
            unit="points",
        ),
        Condition(
            "hardsync, 32 examples: the rule's rate errs more than the best rate, by",
            above_tuned(SMALLER, 0.5),
            at_most=0.02,
            opposite=0.1,
            unit="points",
        ),
        Condition(
            "hardsync, 512 examples: the rule's rate errs more than the best rate, by",
            above_tuned(LARGER, 2.0),
            at_most=0.02,
            opposite=0.1,
            unit="points",
        ),
        Condition(
            "hardsync, 512 examples: alpha0 itself errs more than the rule's rate, by",
            lambda results: at_base(results, *LARGER, HARDSYNC) - at_base(results, *LARGER, HARDSYNC, times=2.0),
            at_least=0.02,
            opposite=-0.02,
            unit="points",
        ),
        beside(
            "hardsync, 512 examples: 4 alpha0, in proportion, errs more than the best rate, by",
            above_tuned(LARGER, 4.0),
            at_most=0.02,
            unit="points",
        ),
        beside(
            "best rates, 128 examples: the worst of 2 to 32 learners errs more than one, by",
            above_reference(ONE, DIAGONAL[1:], is_tuned=True),
            at_most=0.02,
            unit="points",
        ),
        beside(
            "alpha0 / n, 128 examples, async: the worst of 2 to 32 learners errs more than one, by",
            above_reference(ASYNC, DIAGONAL[1:]),
            at_most=0.02,
            unit="points",
        ),
    ),
    shows_not="""Long trainings: 7 to 225 updates are few, and how few governs much of the error here, as it does
    wherever epochs are fixed. The rule for hardsync is known to us by reports. Rates are chosen on the images that they
    are judged by.""",
    reading="""What fails is that learners make no difference at a fixed product, at best rates and at alpha0. On a
    contour the error rises with them, by up to 2.8 ± 0.9 points at best rates and 8.5 ± 2.3 at alpha0 (128 examples, 56
    updates); that its correlation of 0.75 ± 0.13 at best rates is beyond 0.7, the bound of the opposite, these seeds do
    not say. That the product's correlation passes 0.6 was all but given by the wide range of products, with the control
    on it. At 32 to 128 examples, where training is not starved of updates (looked at afterwards), the learners count as
    much as the product: 0.86 ± 0.09 at a fixed product against 0.74 ± 0.11 at alpha0, 0.79 ± 0.06 against 0.86 ± 0.09
    at best rates. That is 1-softsync's: with as many examples an update hardsync at alpha0 stays at the reference's
    error (0.1 ± 0.6 points more), and so does async with alpha0 / n (0.4 ± 0.9), whose updates are many and small. Of
    hardsync's rule the seeds say little. At 32 examples alpha0 itself errs only 0.44 ± 0.38 points more than the best
    rate, so that the condition tells the rule from nothing; at 512 the rule errs 1.89 ± 0.60 points more, which is not
    surely below 2. There the best rate, 2, is the largest of the grid, and a larger one might do better. A rate in
    proportion came closer.""",
    draw=draw,
    quick={"epochs": 0.1},
)
