"""Runs experiments and keeps their results: `python -m experiments --list` names them.

python -m experiments [NAME...]             all trials on the published seeds, table, verdict, picture, page
python -m experiments --quick [NAME...]     a short run on other seeds, into out/experiments, without a verdict
python -m experiments --pilot [NAME...]     the whole on the pilot's seeds, into out/experiments
python -m experiments --judge [NAME...]     verdicts, pictures and page from the tables that are kept
python -m experiments --check               whether what is kept follows from tables and files; runs nothing
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from experiments import harness
from experiments.harness import Experiment


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="experiments; all if none is named")
    parser.add_argument("--processes", type=int, help="as many at once; the processors' number if not given")
    modes = parser.add_mutually_exclusive_group()
    for mode in ("list", "quick", "pilot", "judge", "check"):
        modes.add_argument(f"--{mode}", action="store_true")
    options = parser.parse_args()
    if unknown := set(options.names) - set(harness.NAMES):
        parser.error(f"no experiment {', '.join(sorted(unknown))}; there are {', '.join(harness.NAMES)}")
    experiments = [harness.load(name) for name in options.names or harness.NAMES]
    if options.list:
        for experiment in experiments:
            print(f"{experiment.name:22} {experiment.title}")
    elif options.check:
        sys.exit("\n".join(filter(None, map(harness.out_of_date, experiments))) or 0)
    elif options.judge:
        for experiment in experiments:
            if (table := harness.kept_table(experiment)) is not None:
                print(f"{experiment.name}: {harness.keep(experiment, table)}")
        harness.write_page()
    else:
        with harness.pool(options.processes) as executor:
            for experiment in experiments:
                if options.quick or options.pilot:
                    rehearse(experiment, executor, quick=options.quick)
                else:
                    publish(experiment, executor)


def publish(experiment: Experiment, executor: ProcessPoolExecutor) -> None:
    """Run the published seeds and keep the results."""
    harness.require_committed()
    started = time.monotonic()
    table = harness.kept_table(experiment) if experiment.table_of else None
    if table is None:
        trials = harness.trials_of(experiment, experiment.seeds)
        print(f"{experiment.name}: {len(trials)} trials", flush=True)
        table = harness.run(trials, executor, say=lambda text: print(text, flush=True))
    verdict = harness.keep(experiment, table)
    harness.write_page()
    print(f"{experiment.name}: {verdict}, in {time.monotonic() - started:.0f} s", flush=True)


def rehearse(experiment: Experiment, executor: ProcessPoolExecutor, *, quick: bool) -> None:
    """Run other seeds, and keep nothing in the repository."""
    started = time.monotonic()
    seeds = harness.QUICK_SEEDS if quick else experiment.pilot
    if not seeds:
        print(f"{experiment.name}: had no pilot")
        return
    path = harness.SCRATCH / f"{experiment.table_of or experiment.name}.csv"
    if not (experiment.table_of and path.exists()):
        trials = harness.trials_of(experiment, seeds, replaced=experiment.quick if quick else None)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(harness.run(trials, executor), encoding="utf-8", newline="")
    table = path.read_text(encoding="utf-8")
    results = harness.read(table)
    harness.picture(experiment, results, harness.SCRATCH / f"{experiment.name}.png")
    conditions = experiment.judge(results)["conditions"]
    if not quick:
        for each in conditions:
            print(f"  {each['outcome']:8} {each['measured']:10.4g}  {each['words']}")
    print(f"{experiment.name}: {len(results.rows)} trials in {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
