"""Local training over slow links: the loss at equal time and at equal batches, and the bytes, of many ways to train.

    python benchmarks/local_training.py [--cases 100mbit,50mbit+100ms,100mbit:4,100mbit:killed] [--workers 2]
        [--seconds 60] [--seeds 1] [--only NAME,NAME] [--json FILE] [--picture FILE]                     (as root)

A transformer of 3 million parameters learns the source of Python's standard library, character by character, and is
scored by text that is held out (`local_worker.py`). A batch takes each worker 0.1 s, or 4 times as long where it is the
slow one of `100mbit:4`. `50mbit+100ms` is a link on which a packet and its answer take 100 ms. In `100mbit:killed` the
last worker is killed and started again each minute, first after half a minute.

torchft and Hivemind train under the Pythons that PEERS_PYTHON_TORCHFT and PEERS_PYTHON_HIVEMIND name (training.py says
what these need), and are left out where neither that is set nor ours has them. Outer rates are those of a small pilot.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import figures
import numpy as np
import peers
import pictures
from local_worker import JOINED, PACE, SUBJECTS, TASK
from measure import exit_on_sigterm, machine, write_results
from network import DelayedSwitch, Switch, unavailable
from processes import Processes
from rich.console import Console
from rich.table import Table
from rounds import Row
from training_worker import ALONE, Subject
from trial import START_SECONDS, Failed

import training

# When an exchange was done, the batches of its worker since the last one, and which worker that is.
Exchange = tuple[float, int, int]
SCRIPT = Path(__file__).with_name("local_worker.py")
CASES = "100mbit"
KILLED_EVERY_SECONDS = 60.0
# What ends with the first of its workers.
ENDS = ("ddp",)


@dataclass(frozen=True)
class Case:
    """A link, how much the last worker is slowed, and whether it is killed each minute."""

    name: str
    workers: int

    @property
    def slowed(self) -> float:
        _, _, what = self.name.partition(":")
        return 1.0 if what in {"", "killed"} else float(what)

    @property
    def killed(self) -> bool:
        return self.name.endswith(":killed")

    def switch(self) -> Switch:
        rate, _, delay = self.name.partition(":")[0].partition("+")
        if not delay:
            return Switch(rate, self.workers)
        # There and back.
        return DelayedSwitch(rate, self.workers, delay_seconds=float(delay.removesuffix("ms")) / 2000)


def main() -> int:
    options = arguments()
    console = Console(width=160)
    exit_on_sigterm()
    print(machine(), flush=True)
    if reason := unavailable():
        console.print(f"local_training: skipped, {reason}")
        write_results(options.json, [], skipped=reason)
        return 0
    wanted = {name: of for name, of in SUBJECTS.items() if name.startswith(tuple(options.only.split(",")))}
    left_out = {
        name: peers.lacking(of.module, training.variable(of))
        for name, of in wanted.items()
        if training.python(of) is None
    }
    for name, reason in left_out.items():
        console.print(f"{name} is left out: {reason}", highlight=False)
    facts = {"params": TASK.params, "loss": TASK.loss, "left_out": left_out}
    rows: list[Row] = []
    for seed in range(options.seeds):
        for case in [Case(name, options.workers) for name in options.cases.split(",")]:
            for row in measured(
                case, [of for name, of in wanted.items() if name not in left_out], seed, options.seconds
            ):
                rows.append(row)
                # After each, so that an end midway loses one only.
                write_results(options.json, rows, **facts)
            console.print(table(case, [row for row in rows if row["case"] == case.name]))
    if options.picture is not None and (figure := pictures.local_training({"local_training": {"rows": rows}})):
        figure.savefig(options.picture, dpi=110, bbox_inches="tight")
    return 1 if any("error" in row for row in rows) else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=CASES, help=f"links, and what befalls the last worker (default {CASES})")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=TASK.seconds, help="of each run")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", default="", help="the subjects to measure, by the beginnings of their names")
    parser.add_argument("--json", type=Path, help="also write every measurement here")
    parser.add_argument("--picture", type=Path, help="also draw the loss over time here")
    return parser.parse_args()


def measured(case: Case, subjects: list[Subject], seed: int, seconds: float) -> Iterator[Row]:
    """A row of each subject. A failure is printed, and is a row too."""
    for subject in subjects:
        if case.killed and (subject.way in ENDS or subject.way == "alone"):
            continue
        row: Row = {"subject": subject.name, "case": case.name, "workers": case.workers, "seed": seed}
        try:
            with case.switch() as link:
                row |= one(subject, case, link, seed=seed, seconds=seconds)
        except Failed as error:
            print(f"{subject.name}, {case.name}: {error}", file=sys.stderr)
            row["error"] = str(error)
        yield row


def one(subject: Subject, case: Case, link: Switch, *, seed: int, seconds: float) -> Row:
    """One training. Raises Failed."""
    count = 1 if subject is ALONE else case.workers
    # The joined batches are of all workers, in one process.
    processes = 1 if subject is JOINED else count
    preparing = training.prepared(subject, TASK, count, script=SCRIPT, link=link, transport="tcp")
    with preparing as (commands, environment, folder):
        for index, command in enumerate(commands):
            command += ["--seconds", str(seconds), "--seed", str(seed)]
            if index == processes - 1 and index:
                command += ["--slowed", str(case.slowed)]
        commands = [*commands[:processes], *commands[count:]]
        limit = 2 * START_SECONDS + seconds
        with Processes(commands, environment, folder / "workers.log", limit_seconds=limit) as running:
            began = running.go(processes, restarts=case.killed)
            before = link.bytes_of(0)
            exchanges: list[Exchange] = []
            scores: list[tuple[float, float]] = []
            moved = 0
            kill_at = began + KILLED_EVERY_SECONDS / 2
            for words in map(str.split, running.lines):
                if words[0] == "over":
                    moved = link.bytes_of(0) - before
                    # They would wait for the first meanwhile, some of them in vain, or take the processor from it.
                    running.end(range(1, processes))
                if words[0] == "scores":
                    scores = [(when - began, loss) for when, loss in json.loads("".join(words[1:]))]
                    break
                if words[0].isdigit():
                    exchanges.append((float(words[1]) - began, int(words[2]), int(words[0])))
                if case.killed and kill_at < time.perf_counter() < began + seconds:
                    running.restart(processes - 1)
                    kill_at += KILLED_EVERY_SECONDS
    return {"limit_s": seconds, **summary(exchanges, scores, moved, seconds)}


def summary(exchanges: list[Exchange], scores: list[tuple[float, float]], moved: int, seconds: float) -> Row:
    """The figures of one training: its curve is of seconds, batches of all workers by then, and the loss."""
    curve = [(when, sum(of[1] for of in exchanges if of[0] <= when), loss) for when, loss in scores]
    whens, batches, losses = map(np.array, zip(*curve, strict=True))
    # Losses fall but for their noise: what was reached once counts.
    lows = np.minimum.accumulate(losses)
    # As many as one process alone computes in that time.
    equal = seconds / PACE
    if not (own := sum(count for when, count, index in exchanges if index == 0)):
        raise Failed(f"no exchange in {seconds:g} s")
    return {
        "batches": int(batches[-1]),
        "loss": float(losses[-1]),
        "loss_at_batches": float(np.interp(equal, batches, losses)) if batches[-1] >= 0.9 * equal else None,
        "seconds_to_loss": float(np.interp(-TASK.loss, -lows, whens)) if lows[-1] <= TASK.loss else None,
        "kilobytes_a_batch": moved / 1e3 / own,
        "curve": curve,
    }


def table(case: Case, rows: list[Row]) -> Table:
    """One row a subject."""
    what = "killed each minute" if case.killed else f"{case.slowed:g} times as slow"
    last = f", the last one {what}" if case.killed or case.slowed != 1 else ""
    title = f"{case.name}: {TASK.params:,} parameters, {case.workers} workers{last}; to a loss of {TASK.loss:g}"
    drawn = Table(title=title, title_justify="left")
    for heading in figures.LOCAL_HEADINGS:
        drawn.add_column(heading, justify="right" if heading else "left")
    for cells in figures.local_cells(rows):
        drawn.add_row(*cells)
    return drawn


if __name__ == "__main__":
    sys.exit(main())
