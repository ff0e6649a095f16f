"""Training, end to end: samples a second and seconds to a stated loss, of 2 workers on links from 100 Mbit/s on.

    python benchmarks/training.py [--cases 100mbit,1gbit,10gbit:3] [--transport tcp] [--repeats 1] [--quick]   (as root)

A transformer of 25 million parameters learns a text that a random chain writes; the same batches, the same start, Adam
at the same rate for every subject. `10gbit:3` is a case in which the second worker's computing takes three times as
long. Server and workers have a network namespace each, and a link each to a switch (`network.py`); where this machine
cannot make them, all meet on loopback. A run lasts until the mean loss of the last batches is the stated one and some
more batches are done, or 15 seconds: all of them take ten minutes. With cases of 100mbit a run may take 60 seconds.

torchft and Hivemind train under the Pythons that PEERS_PYTHON_TORCHFT and PEERS_PYTHON_HIVEMIND name, and are left out
where neither that is set nor ours has them; one environment with torch==2.13.0, torchft==0.2.0 and hivemind==1.1.12 is
enough for both.

What it shows is what is left of the speed of one process, and of its progress a batch, when two train together. What
it does not: how fast this model trains. Two workers, a server and the switch share this machine's cores, a batch is
small, and 15 seconds are the beginning of a training only: it says nothing of where one ends.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import figures
import peers
import rounds
from measure import exit_on_sigterm, machine, write_results
from network import INTERFACE, Switch, unavailable
from processes import Processes
from rich.console import Console
from rich.table import Table
from rounds import Row
from training_worker import ALONE, SUBJECTS, TASKS, Subject, Task
from trial import START_SECONDS, Server, Variant
from work import Size

# Transports with a process of their own, which all workers find first.
SERVED = ("rpc", "torchft")
SCRIPT = Path(__file__).with_name("training_worker.py")
WORKERS = 2
LOOPBACK = "loopback"
CASES = "1gbit,10gbit,10gbit:3"
QUICK_CASES = "10gbit:3"
# Of a run over a link on which 15 would show little.
SECONDS = {"100mbit": 60.0}
# A batch's loss says little by itself: so many of the last are what is looked at.
RECENT = 8
# When a worker was done with a batch, and its loss.
Step = tuple[float, float]


def main() -> int:
    options = arguments()
    console = Console(width=150)
    exit_on_sigterm()
    print(machine(), flush=True)
    cases = options.cases or (QUICK_CASES if options.quick else CASES)
    if reason := unavailable():
        console.print(f"training: on loopback instead of links, since {reason}", highlight=False)
        cases = ",".join(dict.fromkeys(LOOPBACK + case[len(case.partition(":")[0]) :] for case in cases.split(",")))
    model = TASKS["170 thousand" if options.quick else "25 million"]
    wanted = {name: subject for name, subject in SUBJECTS.items() if name.startswith(tuple(options.only.split(",")))}
    left_out = {name: peers.lacking(of.module, variable(of)) for name, of in wanted.items() if python(of) is None}
    for name, reason in left_out.items():
        console.print(f"{name} is left out: {reason}", highlight=False)
    reported = {name: versions(of) for name, of in wanted.items() if of.module and name not in left_out}
    rows: list[Row] = []
    facts: dict[str, Any] = {"quick": options.quick, "transport": options.transport}
    facts |= {"params": model.params, "loss": model.loss}
    facts |= {"left_out": left_out, "peer_versions": reported}
    for turn in range(1 if options.quick else options.repeats):
        for number, case in enumerate(cases.split(",")):
            rate, _, factor = case.partition(":")
            slowed = float(factor or 1)
            task = model if options.quick else replace(model, seconds=SECONDS.get(rate, model.seconds))
            with contextlib.nullcontext() if rate == LOOPBACK else Switch(rate, WORKERS) as link:
                measure = partial(measured, link=link, slowed=slowed, transport=options.transport)
                chosen: dict[str, rounds.Subject] = {
                    name: partial(measure, subject)
                    for name, subject in wanted.items()
                    # One process alone has no link and no slow neighbour.
                    if name not in left_out and (subject is not ALONE or number == 0)
                }
                for row in rounds.in_turn(chosen, task, WORKERS, turn):
                    rows.append({"rate": rate, "slowed": slowed, "limit_s": task.seconds} | row)
                    # After each, so that an end midway loses one only.
                    write_results(options.json, rows, **facts)
            console.print(table(task, rate, slowed, figures.of_training_case(rows, rate, slowed)))
    return 1 if any("error" in row for row in rows) else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", help=f"links, and how much the second worker is slowed (default {CASES})")
    parser.add_argument("--transport", default="tcp", help="pyps' way to its server, as PYPS_TRANSPORT takes it")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--only", default="", help="the subjects to measure, by the beginnings of their names")
    parser.add_argument("--quick", action="store_true", help=f"a small model, a few batches: {QUICK_CASES}")
    parser.add_argument("--json", type=Path, help="also write every measurement here")
    return parser.parse_args()


def variable(subject: Subject) -> str:
    """The environment's, that names the Python of a peer."""
    return f"PEERS_PYTHON_{subject.module.upper()}"


def python(subject: Subject) -> str | None:
    """The Python to train with; None where there is none."""
    return peers.python_with(subject.module, variable(subject)) if subject.module else sys.executable


def versions(subject: Subject) -> dict[str, str]:
    """Of a peer and its torch."""
    ask = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    names = (subject.module, "torch")
    reported = subprocess.run([str(python(subject)), "-c", ask, *names], check=True, capture_output=True, text=True)
    return dict(zip(names, reported.stdout.split(), strict=True))


def measured(
    subject: Subject, size: Size, num_workers: int, *, link: Switch | None, slowed: float, transport: str
) -> Row:
    """One training of a subject. Raises Failed."""
    assert isinstance(size, Task)
    count = 1 if subject is ALONE else num_workers
    preparing = prepared(subject, size, count, script=SCRIPT, link=link, transport=transport)
    with preparing as (commands, environment, folder):
        if count > 1:
            commands[count - 1] += ["--slowed", str(slowed)]
        began, steps = trained(commands, size, environment, folder / "workers.log", num_workers=count)
    return {"workers": count, **summary(size, began, steps)}


@contextlib.contextmanager
def prepared(
    subject: Subject, task: Task, count: int, *, script: Path, link: Switch | None, transport: str
) -> Iterator[tuple[list[list[str]], dict[str, str], Path]]:
    """Starts pyps' server; the commands of the workers, then of another server, their environment, and a folder."""
    environment = os.environ | dict.fromkeys(("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), INTERFACE if link else "lo")
    environment["OMP_NUM_THREADS"] = "1"
    served = subject.way in SERVED
    command = [str(python(subject)), str(script), "--task", task.name, "--subject", subject.name, "--count", str(count)]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pyps-bench-")))
        if subject.way == "pyps":
            flags = ("--protocol", subject.protocol, "--expected-workers", str(count))
            server = stack.enter_context(Server(flags, link))
            environment |= Variant(subject.name, transport, subject.codec, subject.parameter_codec).environment
            environment |= server.environment | {"PYPS_WORKER_COUNT": str(count)}
        else:
            # Where all find each other is at the first of them, which is a server where there is one.
            first = (link.server_address if served else link.worker_address) if link else "127.0.0.1"
            command += ["--address", f"{first}:{free_port()}"]
        commands = [[*command, "--index", str(index)] for index in range(count)]
        if link is not None:
            commands = [[*link.on_workers[index], *words] for index, words in enumerate(commands)]
        if served:
            commands.append([*(link.on_server if link else ()), *command, "--serve"])
        yield commands, environment, folder


def trained(
    commands: Sequence[Sequence[str]], task: Task, environment: dict[str, str], log: Path, *, num_workers: int
) -> tuple[float, list[Step]]:
    """Starts the processes and lets the workers train; when they began, and the steps of all. Raises Failed."""
    with Processes(commands, environment, log, limit_seconds=START_SECONDS + task.seconds) as processes:
        began = processes.go(num_workers)
        return began, list(until_done(task, began, map(step_of, processes.lines)))


def step_of(line: str) -> Step:
    when, loss = line.split()
    return float(when), float(loss)


def until_done(task: Task, began: float, steps: Iterator[Step]) -> Iterator[Step]:
    """The steps up to the one that ends a run."""
    losses: list[float] = []
    reached = False
    for when, loss in steps:
        yield when, loss
        losses.append(loss)
        reached = reached or is_reached(task, losses)
        if when - began > task.seconds or (reached and len(losses) >= task.rounds):
            return


def is_reached(task: Task, losses: Sequence[float]) -> bool:
    return len(losses) >= RECENT and statistics.fmean(losses[-RECENT:]) <= task.loss


def summary(task: Task, began: float, steps: Sequence[Step]) -> Row:
    """The figures of one training; without those of the stated loss where it was not reached."""
    losses = [loss for _, loss in steps]
    needed = next((count for count in range(RECENT, len(losses) + 1) if is_reached(task, losses[:count])), None)
    return {
        "samples_per_s": len(steps) * task.sequences / (steps[-1][0] - began),
        "seconds_to_loss": steps[needed - 1][0] - began if needed else None,
        "batches_to_loss": needed,
        "batches": len(steps),
        "loss": statistics.fmean(losses[-RECENT:]),
    }


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def table(task: Task, rate: str, slowed: float, rows: list[Row]) -> Table:
    """One row a subject, next to one process alone."""
    slow = f", the second {slowed:g} times as slow" if slowed != 1 else ""
    title = f"{rate}: {task.params:,} parameters, {WORKERS} workers{slow}; to a loss of {task.loss:g}"
    drawn = Table(title=title, title_justify="left")
    for heading in figures.TRAINING_HEADINGS:
        drawn.add_column(heading, justify="right" if heading else "left")
    for cells in figures.training_cells(rows):
        drawn.add_row(*cells)
    return drawn


if __name__ == "__main__":
    sys.exit(main())
