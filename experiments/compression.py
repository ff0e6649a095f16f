"""How few bits of a gradient are enough, with and without feedback of what an encoding loses?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from experiments.digits_network import NUM_PARAMETERS
from experiments.harness import FRESH_SEEDS, Condition, Experiment, Measure, Results, beside, control
from experiments.training import Training
from pyps.simulation.simulation import WorkerPlan
from pyps_wire.codecs import Codec, SparseCodec, codec_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The training loss of chance: what ends there or above it diverged.
CHANCE_LOSS = 2.3
FLOAT32, INT8, ONEBIT, TOPK, STROM = "float32", "int8", "onebit", "topk:ratio=0.01", "threshold:tau=3"
RATES = (0.1, 0.3, 1.0, 2.0, 4.0, 8.0, 16.0)
# What they may take of bits a number: `onebit` fills up its last block, which counts in a network so small.
LOSSY = {INT8: 8.3, ONEBIT: 1.5, TOPK: 0.3, STROM: 0.5}
RUNS = [*((codec, 1) for codec in (FLOAT32, *LOSSY)), *((codec, 0) for codec in (ONEBIT, TOPK, STROM))]


@dataclass(frozen=True, kw_only=True)
class Compressed(Training):
    """A training whose workers push in few bits."""

    codec: str
    # Whether what an encoding loses is added to the next gradient.
    feedback: int = 1

    def plan(self, index: int, joins_at: float) -> WorkerPlan:
        codec = codec_of(self.codec)
        return replace(super().plan(index, joins_at), codec=codec if self.feedback else forgetful(codec))

    def measure(self) -> dict[str, float]:
        task = self.task()
        simulation = self.simulation(task)
        pushes = round(self.epochs * task.num_examples / self.batch)
        losses = []
        for done in (min(task.num_examples // self.batch, pushes), pushes):
            # Not for ever, if what diverged is refused.
            simulation.run(pushes=done, seconds=pushes)
            parameters = simulation.shards[0].state().parameters
            losses.append(task.train_loss(parameters))
        return {
            **task.held_out_measures(parameters),
            "first_epoch_loss": losses[0],
            "train_loss": losses[1],
            "bits": 8 * simulation.server.bytes_in / (pushes * NUM_PARAMETERS),
        }


def forgetful(codec: Codec) -> Codec:
    """Return the codec without its feedback."""
    setting: Any = codec.value if isinstance(codec, SparseCodec) else codec.max_bytes
    made = type(codec)(int(codec), codec.name, setting)
    made.feedback = 0.0
    return made


def trials(seeds: Sequence[int]) -> Iterator[Compressed]:
    for seed in seeds:
        for codec, feedback in RUNS:
            for rate in RATES:
                yield Compressed(
                    seed=seed,
                    protocol="hardsync",
                    rule="sgd",
                    workers=4,
                    batch=16,
                    epochs=15.0,
                    rate=rate,
                    codec=codec,
                    feedback=feedback,
                )


def best(results: Results, codec: str, feedback: int = 1) -> float:
    """The error at its own best rate."""
    return results.least("test_error", "rate", codec=codec, feedback=feedback)[0]


def above_float32(codec: str) -> Measure:
    return lambda results: best(results, codec) - best(results, FLOAT32)


def without_feedback(codec: str, *rates: float) -> Measure:
    """By how much it errs more without feedback than with it, each at its best of these rates, or of all."""

    def error(results: Results, feedback: int) -> float:
        return min(results.mean("test_error", codec=codec, feedback=feedback, rate=rate) for rate in rates or RATES)

    return lambda results: error(results, 0) - error(results, 1)


def at_best_rate_without(results: Results) -> float:
    """The error of 1 bit without feedback at the rate that is best with it."""
    rate = results.least("test_error", "rate", codec=ONEBIT, feedback=1)[1]
    return results.mean("test_error", codec=ONEBIT, feedback=0, rate=rate)


def largest_rate(results: Results, codec: str, feedback: int = 1) -> float:
    """The largest rate that ends within a point of its best."""
    limit = best(results, codec, feedback) + 0.01
    return max(r for r in RATES if results.mean("test_error", codec=codec, feedback=feedback, rate=r) <= limit)


def diverged(column: str) -> Measure:
    """The share of 1 bit's trainings without feedback whose loss is that of chance, at the largest rate with it."""

    def measure(results: Results) -> float:
        losses = results.values(column, codec=ONEBIT, feedback=0, rate=largest_rate(results, ONEBIT))
        return fmean(loss >= CHANCE_LOSS for loss in losses)

    return measure


def larger_rates(codec: str) -> Measure:
    """How many times larger rates feedback stands."""
    return lambda results: largest_rate(results, codec) / largest_rate(results, codec, 0)


def loss_without(codec: str) -> Measure:
    """How many times larger the training loss is without feedback, at the rate up to 2 where that is least."""

    def ratio(results: Results, rate: float) -> float:
        without, fed_back = (results.mean("train_loss", codec=codec, feedback=each, rate=rate) for each in (0, 1))
        return without / fed_back

    return lambda results: min(ratio(results, rate) for rate in RATES if rate <= 2)


def draw(figure: Figure, results: Results) -> None:
    for axis, column in zip(figure.subplots(1, 2), ("test_error", "train_loss"), strict=True):
        for codec, feedback in RUNS:
            axis.plot(
                RATES,
                [min(results.mean(column, codec=codec, feedback=feedback, rate=rate), 10) for rate in RATES],
                "-o" if feedback else ":x",
                color=f"C{[FLOAT32, *LOSSY].index(codec)}",
                markersize=4,
                label=codec if feedback else f"{codec}, no feedback",
            )
        axis.set(xscale="log", yscale="log", xlabel="learning rate")
        axis.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
        axis.minorticks_off()
    figure.axes[0].set_title("held-out error")
    figure.axes[0].set_yticks((0.02, 0.05, 0.1, 0.3, 0.9), ("2 %", "5 %", "10 %", "30 %", "90 %"))
    figure.axes[1].set_title("training loss (10: or more; gray: chance)")
    figure.axes[1].axhline(CHANCE_LOSS, color="gray", linewidth=0.8)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center", fontsize="small")


EXPERIMENT = Experiment(
    name="compression",
    in_short="""With feedback all are within 0.2 points; without it 1 bit trains up to rate 2 and diverges at 4 and 8,
    not in the first epoch. No deep net.""",
    title="With error feedback one bit a number is enough, and without it training diverges",
    paper="Seide et al. 2014, Strom 2015",
    section="abstract and experiments; top-k as it is commonly used",
    claim="""Gradients of one bit a number train as well as whole ones if each quantization's error is carried into the
    next; without that "training quickly diverges". A threshold (Strom) or the largest numbers (top-k) need far less
    than a bit.""",
    setting="""4 workers train the digits under hardsync with minibatches of 16 and plain SGD for 15 epochs, the rate a
    tenth for the last 15 %, their gradients in the codecs that workers use: `int8`, `onebit` (levels for each 1,024
    numbers, not for each column as in the paper), `topk` of 1 % (feedback 0.95, each number divided by its senders) and
    `threshold` of three times the mean magnitude (in the paper an absolute one). The last three without feedback, too.
    Each at the best of seven rates from 0.1 to 16; training diverged where its loss ends at that of chance, 2.3, or
    above. A first run (seeds 100 to 104) was mixed: it had five rates up to 4, the best of three runs was at the last,
    and its condition for 1 bit without feedback, an error of 50 % at the rate that is best with it, gave 3.2 % and with
    it the opposite. That condition could not see what diverges: the best rate was 1 by a tenth of a point before 2 and
    4, and a network whose loss grows without bound may still err by 10 %. When this was known, and what a few trials at
    8 showed, two rates were added, the condition became one beside, and two of the loss took its place, at the largest
    rate at which 1 bit with feedback errs at most a point more than at its best. This run has seeds of its own.""",
    trials=trials,
    seeds=FRESH_SEEDS,
    pilot=(0,),
    pilot_chose="""the rates; the thresholds of 1.5 and 3 points were written down before; it was repeated with the
    rates of now, and saw 1 bit without feedback diverge at rate 8, though not in the first epoch""",
    conditions=(
        control("float32: error", lambda results: best(results, FLOAT32), at_most=0.08, unit="%"),
        *(
            control(
                f"`{codec}`: bits a number",
                lambda results, codec=codec: results.mean("bits", codec=codec, feedback=1),  # type: ignore[misc]
                at_most=bits,
            )
            for codec, bits in LOSSY.items()
        ),
        *(
            Condition(
                f"`{codec}`: error above that of float32",
                above_float32(codec),
                at_most=0.015,
                opposite=0.05,
                unit="points",
            )
            for codec in LOSSY
        ),
        *(
            Condition(
                f"`onebit` without feedback, at the largest rate with it: trainings that diverged{when}",
                diverged(column),
                at_least=0.8,
                opposite=0.2,
                unit="%",
            )
            for when, column in (("", "train_loss"), (" in the first epoch", "first_epoch_loss"))
        ),
        Condition(
            "`topk` without feedback errs more than with it, by",
            without_feedback(TOPK),
            at_least=0.03,
            opposite=0.0,
            unit="points",
        ),
        *(
            beside(
                f"`{codec}` without feedback errs more than with it, by",
                without_feedback(codec),
                at_least=0.005,
                unit="points",
            )
            for codec in (ONEBIT, STROM)
        ),
        beside(
            "`onebit` without feedback, at the rate that is best with it: error",
            at_best_rate_without,
            at_least=0.5,
            unit="%",
        ),
        *(
            beside(
                f"`{codec}`: the largest rate within a point of its best, with feedback over without",
                larger_rates(codec),
                at_least=1.0,
                has_error=False,
                unit="x",
            )
            for codec in (ONEBIT, TOPK, STROM)
        ),
        *(
            beside(
                f"`{codec}`, rates up to 2: training loss without feedback over that with it, at least",
                loss_without(codec),
                at_least=1.0,
                unit="x",
            )
            for codec in (ONEBIT, TOPK, STROM)
        ),
        *(
            beside(
                f"`{STROM}`, at rate {rate:g}, without feedback errs more than with it, by",
                without_feedback(STROM, rate),
                at_least=0.0,
                unit="points",
            )
            for rate in (4.0, 8.0)
        ),
    ),
    shows_not="""Deep networks of sigmoid units, in which the papers saw training diverge: none was tried. Minibatches
    of thousands; asynchronous training, in which what is carried gets old.""",
    reading="""With feedback all four are within 0.2 points of float32 at their best rates, `topk` and `threshold` with
    a quarter of a bit. Without it 1 bit learns at rates up to 2; at its best rate it errs 0.8 points more. At 4 four of
    five trainings diverge, and at 8, where 1 bit with feedback trains best, all: the loss grows to 1e15, while the
    error is 11 %, which is why the first run's condition could not see it. So Seide's divergence is seen at large
    rates, and not quickly: after the first epoch no loss is above chance. And 8 is a large rate indeed: float32 errs by
    11 % there, and 1 bit with feedback by 2.2 %. Feedback lowers the training loss at equal rates up to 2: 1.6 to 2.7
    times (1 bit), 3 to 13 times (`topk`), 4 to 18 times (`threshold`). `topk` loses 1.8 points without it, not three.
    With `threshold` feedback makes large rates worse: at 4 it errs 0.9 points more than without, and at 8 it errs by 35
    % against 2.6 %; at its best rate it is 0.3 points ahead.""",
    draw=draw,
    quick={"epochs": 0.1},
)
