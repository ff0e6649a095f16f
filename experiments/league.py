"""Every staleness policy of the servers, and two corrections from elsewhere, each at its own best rate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from experiments import digits_network
from experiments.harness import Condition, Experiment, Measure, Results, beside, control
from experiments.training import Task, Training
from pyps.core.arrays import Floats
from pyps.simulation.simulation import Compute, Computed, Step

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TIMINGS = ("normal:0.1", "lognormal:0.5", "exponential")
RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
# An update is one gradient here, so that `per_update` is `divide`.
POLICIES = ("none", "divide", "divide_plus_one", "constant", "exponential", "polynomial", "hinge", "drop")
DC_CONSTANT, DC_ADAPTIVE, GAP_AWARE = "DC-ASGD-c", "DC-ASGD-a", "Gap-Aware"
CORRECTIONS = (DC_CONSTANT, DC_ADAPTIVE, GAP_AWARE)
WAYS = (*POLICIES, *CORRECTIONS)


@dataclass(frozen=True, kw_only=True)
class Match(Training):
    """A training with a policy, or without one but with a correction of the gradients."""

    looks_per_epoch = 4
    way: str

    def computation(self, task: Task, present: Callable[[], Floats]) -> Compute:
        """A gradient is corrected on arrival, by the parameters that it will change: pushes take no time."""
        compute = super().computation(task, present)
        if self.way in POLICIES:
            return compute
        correct = gap_aware() if self.way == GAP_AWARE else delay_compensation(adaptive=self.way == DC_ADAPTIVE)

        def corrected(step: Step) -> Computed:
            computed = compute(step)
            if not computed.gradients:
                return computed
            with np.errstate(all="ignore"):
                gradient = correct(step.worker_id, computed.gradients[0], step.parameters[0], present())
            return computed._replace(gradients={0: gradient} if np.isfinite(gradient).all() else {})

        return corrected


# Takes a worker's name, its gradient, the parameters that it pulled, and those that it will change.
Correction = Callable[[str, Floats, Floats, Floats], Floats]


def delay_compensation(*, adaptive: bool) -> Correction:
    """Return g + lambda * g * g * (theta - theta_pulled) (Zheng et al. 2017).

    lambda is 0.04, or 2 over the root of the mean square of the worker's gradients.
    """
    squares: dict[str, Floats] = defaultdict(lambda: np.zeros(digits_network.NUM_PARAMETERS, np.float32))

    def correct(worker_id: str, gradient: Floats, pulled: Floats, present: Floats) -> Floats:
        strength: Floats | float = 0.04
        if adaptive:
            squares[worker_id] = np.float32(0.95) * squares[worker_id] + np.float32(0.05) * gradient * gradient
            strength = 2 / np.sqrt(squares[worker_id] + np.float32(1e-7))
        return (gradient + strength * gradient * gradient * (present - pulled)).astype(np.float32)

    return correct


def gap_aware() -> Correction:
    """Return g / (1 + |theta - theta_pulled| / the usual size of an update), number by number (Barkai et al. 2020)."""
    before: Floats | None = None
    square, decay = np.zeros(digits_network.NUM_PARAMETERS), 1.0

    def correct(worker_id: str, gradient: Floats, pulled: Floats, present: Floats) -> Floats:
        nonlocal before, square, decay
        if before is not None:
            # The last push was an update, which moved the parameters by this.
            square, decay = 0.999 * square + 0.001 * (present - before) ** 2, 0.999 * decay
        before = present
        usual = np.sqrt(square / (1 - decay)) if decay < 1 else square
        corrected: Floats = (gradient / (1 + np.abs(present - pulled) / (usual + 1e-10))).astype(np.float32)
        return corrected

    return correct


def trials(seeds: Sequence[int]) -> Iterator[Match]:
    for seed in seeds:
        for way in WAYS:
            policy = way if way in POLICIES else "none"
            for timing in TIMINGS:
                for rate in RATES:
                    yield Match(
                        seed=seed,
                        way=way,
                        staleness=policy,
                        timing=timing,
                        rate=rate,
                        batch=16,
                        epochs=10.0,
                        drop=1.0,
                        target=0.2,
                    )
            # Alone, without staleness.
            yield Match(seed=seed, way=way, staleness=policy, workers=1, rate=0.03, batch=16, epochs=1.0, drop=1.0)


def error(results: Results, way: str, timing: str) -> float:
    return results.least("test_error", "rate", workers=30, way=way, timing=timing)[0]


def soonest(results: Results, way: str, timing: str) -> float:
    """The time to the target; the whole time where no rate reaches it with every seed."""
    whole = results.mean("virtual_seconds", workers=30, way=way, timing=timing)
    return min(whole, results.soonest(workers=30, way=way, timing=timing))


def more_errors(way: str, others: Sequence[str] = ("none",)) -> Measure:
    """How much more it errs than the best of others, each at its own best rate, at the timing that suits it least."""

    def measure(results: Results, timing: str) -> float:
        return error(results, way, timing) - min(error(results, other, timing) for other in others)

    return lambda results: max(measure(results, timing) for timing in TIMINGS)


def sooner(way: str) -> Measure:
    """How many times as long `none` takes to the target, at the timing that suits the other least."""
    return lambda results: min(soonest(results, "none", timing) / soonest(results, way, timing) for timing in TIMINGS)


def apart(results: Results) -> float:
    """The largest difference that a way makes to the loss of one worker, whose gradients are fresh."""
    losses = [results.values("train_loss", workers=1, way=way) for way in WAYS]
    return max(abs(mine - plain) for each in losses for mine, plain in zip(each, losses[0], strict=True))


def draw(figure: Figure, results: Results) -> None:
    errors, times = figure.subplots(1, 2, sharey=True)
    for place, timing in enumerate(TIMINGS):
        rows = [index + 0.27 * place for index in range(len(WAYS))]
        errors.barh(rows, [100 * error(results, way, timing) for way in WAYS], height=0.25, label=timing)
        times.barh(rows, [soonest(results, way, timing) for way in WAYS], height=0.25)
    errors.set_yticks([index + 0.27 for index in range(len(WAYS))], WAYS, fontsize="small")
    errors.invert_yaxis()
    errors.set(xlabel="held-out error in % at its own best rate", xlim=(0, None))
    times.set(xlabel="virtual seconds to a training loss of 0.2")
    figure.legend(title="compute times", loc="outside right center")


EXPERIMENT = Experiment(
    name="league",
    title="Division, DC-ASGD and Gap-Aware are no worse than stale gradients as they are",
    in_short="""Gap-Aware may err a point more than `none`, the others do not; `drop` alone is better throughout. A
    small network, momentum.""",
    paper="Zhang et al. 2016, Zheng et al. 2017 (DC-ASGD) and Barkai et al. 2020 (Gap-Aware)",
    section="abstracts",
    claim="""Each of the three: asynchronous training is more accurate with what they do to stale gradients than
    without. Judged here is less: that it is no worse, each way at its own best rate.""",
    setting=f"""30 workers, `async`: every gradient is an update, 29 updates old on average. The digits, minibatches of
    16, 10 epochs at a constant rate, momentum 0.9 on the servers; compute times normal with a variation of 0.1,
    log-normal with sigma 0.5, and exponential. Every policy of the servers with its usual settings (`per_update` is
    `divide` here), and three corrections that pyps does not have, computed from the servers' parameters at a push's
    arrival: DC-ASGD with a constant and an adaptive strength, and Gap-Aware. Each at its own best of five rates from
    {RATES[0]} to {RATES[-1]:g}, at the times that suit it least. The target is a training loss of 0.2.""",
    trials=trials,
    pilot=(0,),
    pilot_chose="""minibatch, epochs and rates, with machines alike; it saw both corrections with 2 to 3 points more
    than `none`, which was at its best at 0.01. After the thresholds were fixed the code was changed to take the whole
    time where no rate reaches the target with every seed, as with `hinge`; no condition depends on it""",
    conditions=(
        control(
            "`none`: error",
            lambda results: max(error(results, "none", timing) for timing in TIMINGS),
            at_most=0.08,
            unit="%",
        ),
        control("one worker: largest difference of its loss from that of `none`", apart, at_most=0.0, has_error=False),
        *(
            Condition(
                f"{way}: error above that of `none`", more_errors(way), at_most=0.01, opposite=0.02, unit="points"
            )
            for way in ("divide", DC_ADAPTIVE, GAP_AWARE)
        ),
        *(
            beside(f"{way}: error above that of `none`", more_errors(way), at_most=0.01, unit="points")
            for way in (*POLICIES[2:], DC_CONSTANT)
        ),
        beside("`divide`: error above the best policy's", more_errors("divide", POLICIES), at_most=0.01, unit="points"),
        *(
            beside(f"{way}: sooner at the target than `none`, times", sooner(way), at_least=0.9, unit="x")
            for way in ("divide", "constant", DC_ADAPTIVE, GAP_AWARE)
        ),
    ),
    shows_not="""What corrections do for a deep network, which their papers train, without momentum, or with other
    settings than the papers'. A difference of less than half a point. Rates are chosen on the images that judge.""",
    reading="""What fails is Gap-Aware, by 1.22 ± 0.81 points against one: whether it passes a point these seeds do not
    say. No way but `drop` and `hinge` differs from `none` at all three compute times in one direction by more than
    twice its error. In points above `none`, with machines alike, at log-normal and at exponential times: `divide` -0.61
    ± 0.54, -0.67 ± 0.34 and 0.44 ± 0.21; DC-ASGD-a 0.11 ± 0.64, -0.56 ± 0.14 and -0.28 ± 0.23; Gap-Aware 1.22 ± 0.81,
    -0.56 ± 0.38 and -0.33 ± 0.24; `polynomial` -0.56 ± 0.23, -1.11 ± 0.22 and -0.22 ± 0.14; `hinge` 2.4 ± 0.3, 9.9 ±
    4.5 and 0.8 ± 0.2; `drop` -1.4 ± 0.5, -1.2 ± 0.2 and -0.9 ± 0.2. `drop` has its price: what it drops is not counted
    among the ten epochs, so that its workers compute 1.9 to 2.6 times as many gradients and take as much longer.
    `constant` is `none` at a thirtieth of the rate: its 0 points are 0.3 / 30, the same rate. With machines alike and
    at log-normal times `none` and DC-ASGD are best at the grid's smallest rate, and with machines alike `hinge` at its
    largest, so that these might be better beyond. A first control, of the largest difference with one worker, holds to
    the bit.""",
    draw=draw,
    quick={"epochs": 0.12, "target": 2.0},
)
