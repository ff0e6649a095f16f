"""Play histories: python -m tests.simulation [--histories N] [--seed S] [--processes P] [--mutants] [--replay SEED]

Prints what was met, and the first failures, each made as small as it goes. Exits with 1 where one fails, or a mark is
missing. With --mutants each seeded fault of the product is played until a history finds it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from tests.simulation.marks import missing
from tests.simulation.mutants import MUTANTS, Mutant
from tests.simulation.plan import Plan, draw
from tests.simulation.play import History, simulated

# Histories of a batch, after which the garbage of dead processes is freed.
BATCH = 100
# Failures that are made small, and how many plans are tried for each.
SHRUNK_MAX = 5
SHRINK_TRIES_MAX = 300


@dataclass
class Report:
    histories: int = 0
    lost: int = 0
    marks: Counter[str] = field(default_factory=Counter)
    # The failing plans and what is wrong in each.
    failures: list[tuple[Plan, list[str]]] = field(default_factory=list)

    def add(self, other: Report) -> None:
        self.histories += other.histories
        self.lost += other.lost
        self.marks += other.marks
        self.failures += other.failures


def failures_of(plan: Plan) -> list[str]:
    try:
        return History(plan).play().world.failures
    except Exception as error:
        return [f"the history ended by {error!r}"]


def play(seeds: range) -> Report:
    """Play a history for each seed."""
    report = Report()
    for start in range(0, len(seeds), BATCH):
        with simulated():
            for seed in seeds[start : start + BATCH]:
                history = History(draw(seed)).play()
                report.histories += 1
                report.lost += history.lost
                report.marks += history.world.marks
                if history.world.failures:
                    report.failures.append((history.plan, history.world.failures))
    return report


def play_on(num_processes: int, seeds: range) -> Report:
    """Play a history for each seed, on several processes."""
    report = Report()
    parts = [seeds[start : start + BATCH] for start in range(0, len(seeds), BATCH)]
    with ProcessPoolExecutor(num_processes) as pool:
        for part in pool.map(play, parts):
            report.add(part)
    return report


def shrunk(plan: Plan) -> Plan:
    """Return a plan with as little as possible that still fails."""
    with simulated():
        tries, is_smaller = 0, True
        while is_smaller and tries < SHRINK_TRIES_MAX:
            is_smaller = False
            for smaller in plan.smaller():
                tries += 1
                if failures_of(smaller):
                    plan, is_smaller = smaller, True
                    break
    return plan


def find(mutant: Mutant, seeds: range) -> tuple[int, str]:
    """Return how many histories it took until one found the fault, and what it said; 0 for none."""
    for start in range(0, len(seeds), BATCH):
        with simulated(), mutant.seeded():
            for count, seed in enumerate(seeds[start : start + BATCH], start + 1):
                if failures := failures_of(draw(seed)):
                    return count, failures[0]
    return 0, ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="the first; the others follow it")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--mutants", action="store_true")
    parser.add_argument("--replay", type=int, help="print what happens in the history of this seed")
    options = parser.parse_args()
    seeds, began = range(options.seed, options.seed + options.histories), time.monotonic()
    if options.replay is not None:
        with simulated():
            history = History(draw(options.replay)).play()
        print(history.plan, *history.world.trace, *history.world.failures, history.world.trace_hash, sep="\n")
        return bool(history.world.failures)
    if options.mutants:
        with ProcessPoolExecutor(options.processes) as pool:
            counts = []
            for mutant, (count, words) in zip(MUTANTS, pool.map(partial(find, seeds=seeds), MUTANTS), strict=True):
                counts.append(count)
                print(f"{count or 'NONE':>6}  {mutant.name}: {words}", flush=True)
        return not all(counts)
    report = play_on(options.processes, seeds)
    print(f"{report.histories} histories in {time.monotonic() - began:.0f} s, of {report.lost} the run was never saved")
    print(*(f"{count:8}  {mark}" for mark, count in sorted(report.marks.items())), sep="\n")
    for plan, failures in report.failures[SHRUNK_MAX:]:
        print(f"FAILED: seed {plan.seed}: {failures[0]}")
    for plan, failures in report.failures[:SHRUNK_MAX]:
        small = shrunk(plan)
        with simulated():
            print(f"\nFAILED: {failures[0]}\n{plan}\nas small as it goes: {small}\n  {failures_of(small)[0]}")
    if lacking := missing(report.marks):
        print("never met:", *lacking, sep="\n  ")
    print(f"{len(report.failures)} histories failed")
    return bool(report.failures or lacking)


if __name__ == "__main__":
    sys.exit(main())
