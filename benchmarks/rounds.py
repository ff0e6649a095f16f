"""Push-and-pull rounds per second through a real server, by model size and workers, next to peers if given.

    python benchmarks/rounds.py [--peers FOLDER] [--cases small:1,mid:4] [--repeats 3] [--only NAME,NAME] [--quick]

In each round a worker rewrites its whole gradient and ends with the new parameters in its own torch parameters;
the peers do the same. All cases come in turn, as often as there are repeats, and in each all subjects (pyps, peer,
peer, ... and back): an end midway costs repeats, and no case. Cells are medians with the range. Processes may use all
cores; with the small model the server has one core and the workers share another, since latency is the question there.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import figures
import peers
import trial
from measure import exit_on_sigterm, machine, spread, write_results
from rich.console import Console
from rich.table import Table
from trial import Failed
from work import SIZES, Size


@dataclass(frozen=True)
class Case:
    """A model's size and a number of workers; empty names stand for all subjects."""

    size: str
    workers: int
    names: tuple[str, ...] = ()


# Those that matter most come first.
CASES = (
    Case("big", 1),
    Case("big", 2),
    # For the server's memory.
    Case("big", 4, (trial.LANE.name, trial.GRPC.name)),
    Case("small", 1),
    Case("mid", 1),
)
QUICK_CASES = [case for case in CASES if case.workers == 1]
COLUMNS = {
    "rounds/s": ("rounds_per_s", 1),
    "p50 ms": ("p50_ms", 2),
    "p99 ms": ("p99_ms", 2),
    "server CPU s/GB": ("server_cpu_s_per_gb", 2),
    "worker CPU s/GB": ("worker_cpu_s_per_gb", 2),
    "peak memory, MB": ("server_peak_mb", 0),
}

Row = dict[str, Any]
# Measures one size with so many workers.
Subject = Callable[[Size, int], Row]


def main() -> int:
    options = arguments()
    console = Console(width=170)
    exit_on_sigterm()
    print(machine(), flush=True)
    found, left_out = peers.available(options.peers)
    for name, reason in left_out.items():
        console.print(f"{name} is left out: {reason}", highlight=False)
    rows: list[Row] = []
    versions: dict[str, dict[str, str]] = {}
    facts = {"left_out": left_out, "quick": options.quick, "peer_versions": versions}
    for turn in range(1 if options.quick else options.repeats):
        for case in options.cases or (QUICK_CASES if options.quick else CASES):
            size = SIZES[case.size].shortened(3) if options.quick else SIZES[case.size]
            chosen = subjects(options.peers, found, case, only=options.only)
            for row in in_turn(chosen, size, case.workers, turn):
                if "versions" in row:
                    versions[row["subject"]] = row.pop("versions")
                rows.append(row)
                # After each, so that an end midway loses one only.
                write_results(options.json, rows, **facts)
            of_case = [row for row in rows if (row["size"], row["workers"]) == (size.name, case.workers)]
            console.print(table(size, case.workers, of_case))
    return 1 if any("error" in row for row in rows) else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=os.environ.get("PEERS"), help="folder of the peers' scripts")
    parser.add_argument("--cases", type=_cases, help="sizes and numbers of workers, as small:1,mid:4")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="the subjects to measure, by the beginnings of their names")
    parser.add_argument("--quick", action="store_true", help="one worker, once, with a third of the rounds")
    parser.add_argument("--json", type=Path, help="also write every measurement here")
    return parser.parse_args()


def _cases(text: str) -> list[Case]:
    return [Case(size, int(workers)) for size, _, workers in (case.partition(":") for case in text.split(","))]


def subjects(folder: Path | None, found: Sequence[peers.Peer], case: Case, *, only: str = "") -> dict[str, Subject]:
    """Everything that a case compares, by name."""
    chosen: dict[str, Subject] = {variant.name: partial(trial.run, variant) for variant in trial.VARIANTS}
    if folder is not None:
        chosen |= {peer.name: partial(peers.run, folder, peer) for peer in found if case.size in peer.sizes}
    wanted = tuple(only.split(","))
    return {
        name: subject
        for name, subject in chosen.items()
        if name.startswith(wanted) and (not case.names or name in case.names)
    }


def in_turn(chosen: dict[str, Subject], size: Size, num_workers: int, turn: int) -> Iterator[Row]:
    """A row of each subject, in every second turn backwards. A failure is printed, and is a row too."""
    for name in list(chosen)[:: 1 if turn % 2 == 0 else -1]:
        row: Row = {"subject": name, "size": size.name, "params": size.params, "workers": num_workers}
        try:
            row |= chosen[name](size, num_workers)
        except Failed as error:
            print(f"{name}, {size.name}, {num_workers} worker(s): {error}", file=sys.stderr)
            row["error"] = str(error)
        yield row


def table(size: Size, num_workers: int, rows: list[Row]) -> Table:
    """One row a subject, next to torch RPC at its best."""
    where = "server and workers on a core each" if size.pinned else "all on all cores"
    title = f"{size.name}: {size.params:,} parameters in {size.keys} tensors, {num_workers} worker(s), {where}"
    drawn = Table(title=title, title_justify="left")
    drawn.add_column("")
    for heading in ("x torch RPC", *COLUMNS, "checked"):
        drawn.add_column(heading, justify="right")
    reference = figures.fastest(rows, figures.is_torch_rpc)
    for subject in dict.fromkeys(row["subject"] for row in rows):
        speed = figures.median(rows, subject)
        ratio = f"{speed / reference[1]:.2f}" if speed and reference else "–"
        cells = [spread(figures.values(rows, subject, column), digits) for column, digits in COLUMNS.values()]
        ok = all(row.get("verified") for row in rows if row["subject"] == subject)
        drawn.add_row(subject, ratio, *cells, "yes" if ok else "NO")
    return drawn


if __name__ == "__main__":
    sys.exit(main())
