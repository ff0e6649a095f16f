"""How long a pass of Sandblaster takes where two workers of twenty are slow, in virtual time.

Dean et al. 2012, section 4.2: portions much smaller than a worker's share of the data set, given to whoever is free,
and copies of the last ones, of which the first to be finished counts. The queue is the servers' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.sandblaster_crew import Span, VirtualCrew
from pyps.simulation.simulation import Timing, normal

WORKERS = 20
# So many of them are SLOWDOWN times as slow; the others' speeds are exp(SPEED_SPREAD N(0, 1)).
SLOW_WORKERS = 2
SLOWDOWN = 8
SPEED_SPREAD = 0.2
TIME_VARIATION = 0.1
PORTIONS = 200
# An example takes a tenth of a second at speed 1, so a portion takes a second.
PORTION_EXAMPLES = 10
EXAMPLE_SECONDS = 0.1
COPIES_MAX = 2
# The later passes show who gets what it had before.
PASSES = 3
SEEDS = tuple(range(10))

# Each worker its share; portions to whoever is free; copies of the last ones too.
MODES = ("static", "dynamic", "backup")


@dataclass(frozen=True)
class Makespan:
    """How long one pass took, and what else there was to see."""

    mode: str
    seed: int
    # From 0.
    pass_number: int
    # In units of the ideal: all work divided by the sum of all speeds.
    makespan: float
    # Portions computed in vain, as a share of all.
    wasted: float
    # Of the portions: those next to one that their worker had too, and those that it had in the pass before.
    consecutive: float
    repeated: float


def speeds(seed: int) -> list[float]:
    """How much quicker than an ordinary worker each of them is."""
    drawn = np.exp(SPEED_SPREAD * np.random.default_rng(seed).standard_normal(WORKERS))
    # Which ones are slow is all the same: the queue knows nothing of speeds before the first portion is done.
    drawn[:SLOW_WORKERS] /= SLOWDOWN
    return [float(speed) for speed in drawn]


def timings(seed: int) -> list[Timing]:
    """Seconds an example takes on each worker."""
    return [normal(EXAMPLE_SECONDS / speed, variation=TIME_VARIATION) for speed in speeds(seed)]


def ideal_seconds(seed: int) -> float:
    """What a pass would take if work could be cut as finely as one liked."""
    return PORTIONS * PORTION_EXAMPLES * EXAMPLE_SECONDS / sum(speeds(seed))


def measure(seed: int) -> list[Makespan]:
    """Returns what each mode makes of one crew."""
    static = Makespan("static", seed, 0, static_seconds(seed) / ideal_seconds(seed), 0.0, 1 - WORKERS / PORTIONS, 0.0)
    return [static, *_dynamic("dynamic", seed), *_dynamic("backup", seed)]


def static_seconds(seed: int) -> float:
    """Returns when the last worker is done with the same share of the portions as the others have."""
    share = PORTIONS // WORKERS
    ends = []
    for index, timing in enumerate(timings(seed)):
        random = np.random.default_rng([seed, index])
        ends.append(sum(PORTION_EXAMPLES * timing(number, random) for number in range(share)))
    return max(ends)


def run_crew(mode: str, seed: int) -> tuple[VirtualCrew, list[float]]:
    """Makes the passes with the queue, and returns the crew and how many seconds each pass took."""
    crew = VirtualCrew(timings(seed), num_examples=PORTIONS * PORTION_EXAMPLES, seed=seed)
    seconds = []
    for number in range(1, PASSES + 1):
        began = crew.now
        crew.begin_pass(number, num_portions=PORTIONS, copies_max=COPIES_MAX if mode == "backup" else 1)
        outcome = crew.await_pass(number)
        assert outcome.example_count == PORTIONS * PORTION_EXAMPLES
        seconds.append(crew.now - began)
    # Copies that were beaten in the last pass are computed to their ends too.
    crew.finish()
    return crew, seconds


def _dynamic(mode: str, seed: int) -> list[Makespan]:
    crew, seconds = run_crew(mode, seed)
    ideal = ideal_seconds(seed)
    rows, before = [], set[tuple[str, int]]()
    for number, taken in enumerate(seconds, start=1):
        spans = list(crew.spans_of(number))
        counted = {(span.worker_id, span.portion.portion_id) for span in spans if span.counted}
        follows = {(worker_id, portion_id + 1) for worker_id, portion_id in counted}
        rows.append(
            Makespan(
                mode,
                seed,
                number - 1,
                makespan=taken / ideal,
                wasted=_wasted(spans) / PORTIONS,
                consecutive=len(counted & follows) / PORTIONS,
                repeated=len(counted & before) / PORTIONS,
            )
        )
        before = counted
    return rows


def _wasted(spans: Sequence[Span]) -> int:
    return sum(not span.counted for span in spans)
