"""Do a few backup workers save synchronous training from its slowest ones?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from experiments.harness import Condition, Experiment, Measure, Results, beside, control
from experiments.training import Training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NEEDED = 24
BACKUPS = (0, 1, 2, 4, 8)
TIMES = ("lognormal:0.5", "normal:0.1", "exponential")


def trials(seeds: Sequence[int]) -> Iterator[Training]:
    for seed in seeds:
        for times in TIMES:
            for backups in BACKUPS:
                yield Training(
                    seed=seed, protocol=f"backup:b={backups}", workers=NEEDED + backups, timing=times, batch=4
                )
            yield Training(seed=seed, protocol="async", staleness="divide", workers=NEEDED, timing=times)


def mean(results: Results, column: str, backups: int, times: str = TIMES[0]) -> float:
    return results.mean(column, protocol=f"backup:b={backups}", timing=times)


def quicker(backups: int, times: str = TIMES[0]) -> Measure:
    """How many times as quick as without backups: 24 gradients make each update either way."""
    return lambda results: mean(results, "virtual_seconds", 0, times) / mean(results, "virtual_seconds", backups, times)


def each(backups: int, times: str = TIMES[0]) -> Measure:
    """The same for a worker: what the backups compute is paid as well."""
    return lambda results: quicker(backups, times)(results) * NEEDED / (NEEDED + backups)


def draw(figure: Figure, results: Results) -> None:
    time, error = figure.subplots(1, 2)
    for times in TIMES:
        time.plot(BACKUPS, [quicker(backups, times)(results) for backups in BACKUPS], "-o", label=times)
    for times in TIMES:
        means = [100 * mean(results, "test_error", backups, times) for backups in BACKUPS]
        error.plot(BACKUPS, means, "-o", label=times)
    time.set(xlabel=f"backup workers beside {NEEDED}", ylabel="times as quick as without")
    error.set(xlabel=f"backup workers beside {NEEDED}", ylabel="held-out error in %")
    for axis in (time, error):
        axis.margins(x=0.06, y=0.12)
        axis.set_ylim(bottom=0)
        axis.set_xticks(BACKUPS)
    time.legend(title="compute times")


EXPERIMENT = Experiment(
    name="backup_workers",
    title="A few backup workers make synchronous training quicker, and as accurate",
    in_short="Quicker where times vary widely; `async` with `divide` is quicker still and as accurate.",
    paper="Chen et al. 2016",
    section="abstract",
    claim="""Synchronous training with backup workers, of which the late gradients of each step are dropped, avoids
    the slowest workers' delay, and converges to a better accuracy than asynchronous training.""",
    setting="""24 gradients make an update of the digits' network, minibatches of 4, rate 0.1, 20 epochs of gradients
    taken, as for large rates; beside 24 workers there are 0 to 8 more, whose late gradients are dropped. Compute
    times log-normal with sigma 0.5, beside it normal with a variation of 0.1, and exponential.""",
    trials=trials,
    pilot=(0,),
    pilot_chose="the times",
    conditions=(
        control("no backups: error", lambda results: mean(results, "test_error", 0), at_most=0.08, unit="%"),
        Condition(
            "sigma 0.5: as quick with 1 backup (4 %) as without, times",
            quicker(1),
            at_least=1.15,
            opposite=1.0,
            unit="x",
        ),
        Condition(
            "sigma 0.5: as quick with 4 backups as without, times", quicker(4), at_least=1.3, opposite=1.0, unit="x"
        ),
        Condition(
            "sigma 0.5, 4 backups: error above that without",
            lambda results: mean(results, "test_error", 4) - mean(results, "test_error", 0),
            at_most=0.02,
            unit="points",
        ),
        Condition(
            "sigma 0.5: error of `async` with `divide` above that of 4 backups",
            lambda results: (
                results.mean("test_error", protocol="async", timing=TIMES[0]) - mean(results, "test_error", 4)
            ),
            at_least=0.005,
            opposite=-0.005,
            unit="points",
        ),
        beside("sigma 0.5: worker by worker as quick with 4 backups, times", each(4), at_least=1.0, unit="x"),
        beside(
            "variation 0.1: worker by worker as quick with 4 backups, times", each(4, TIMES[1]), at_least=1.0, unit="x"
        ),
        beside(
            "exponential: worker by worker as quick with 4 backups, times", each(4, TIMES[2]), at_least=1.0, unit="x"
        ),
        beside(
            "sigma 0.5: as quick `async` as 4 backups, worker by worker, times",
            lambda results: (
                mean(results, "virtual_seconds", 4)
                * (NEEDED + 4)
                / NEEDED
                / results.mean("virtual_seconds", protocol="async", timing=TIMES[0])
            ),
            at_least=1.0,
            unit="x",
        ),
    ),
    shows_not="""A worker that is always slow: its data would never be learned from. Nor failures, against which
    backups help as well.""",
    reading="""Backups make updates quicker where times vary widely, more than their own computing costs. Where
    machines are alike, four backups of 24 cost more than they save. `async` with `divide` is as accurate to a ninth
    of a point, and quicker still. Chen et al. had no division: `none` at this rate ends at chance (large rates), which
    would confirm them, and at a fifth of it is as accurate as `divide`.""",
    draw=draw,
    quick={"epochs": 1.0},
)
